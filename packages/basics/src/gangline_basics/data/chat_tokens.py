"""Tokens and loss mask of a rendered conversation. Torch-free.

n tokens of a conversation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gangline_basics.data.answers import RenderedChat
from gangline_basics.data.chat import ChatTemplate
from gangline_basics.data.codec import TextCodec, TokenizerCodec

# Version of the loss mask below, for caches on disk; errors of earlier versions:
# 1: all text that a template adds with an answer was trained on, also the newline after the end token, and
#    `{% generation %}` was ignored. 2: the end token was searched in the text after an answer's content, including tool
#    calls. 3: answers of weight 0 were trained on. 4: conversations were trained on although the template omits their
#    last reasoning. 5: the same for reasoning next to a tool call, or in parts.
LOSS_MASK_RULE = 6
NONE = -1  # in place of the id of a missing token


@dataclass(frozen=True)
class MaskedTokens:
    """Tokens (n,) of a conversation, and its loss mask (n,) bool: True for tokens of answers, which are trained on."""

    tokens: np.ndarray
    loss_mask: np.ndarray


class ChatEncoder:
    """Encoder of rendered conversations to tokens and loss masks. It adds no special tokens to the template's own.

    A token is trained on if it has a character of an answer, as in transformers (`return_assistant_tokens_mask`). An
    answer that the template does not mark ends with the last special token that the template writes after the answer,
    or with the tokenizer's eos_token if the template writes it there. The text after that token, such as a newline or
    the beginning of the next turn, is not trained on. Special tokens are the tokenizer's added tokens, except white
    space, and the named tokens of the template, such as bos_token.
    """

    def __init__(self, codec: TextCodec, template: ChatTemplate) -> None:
        self.codec, self.template = codec, template
        self._special = np.asarray(sorted(_find_special(codec, template)), np.int64)
        self._end = _find_id(codec, template.special.get("eos_token"))

    def __call__(self, chats: Sequence[RenderedChat]) -> list[MaskedTokens]:
        encodings = zip(chats, self._encode_places([chat.text for chat in chats]), strict=True)
        return [
            MaskedTokens(ids.astype(self.codec.dtype), self._mask_answers(chat, ids, at))
            for chat, (ids, at) in encodings
        ]

    def _mask_answers(self, chat: RenderedChat, ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """Return the mask of tokens to train on, (n,) bool. places (n, 2): each token's characters [start, stop)."""
        begins, ends = places.T
        special, mask = np.isin(ids, self._special), np.zeros(len(ids), bool)
        for start, stop, content_stop in chat.answers:
            behind = special & (begins >= content_stop) & (begins < stop)
            end_tokens = behind & (ids == self._end)
            until = ends[end_tokens if end_tokens.any() else behind]
            mask |= (ends > start) & (begins < (until[-1] if len(until) else stop))
        return mask

    def _encode_places(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (token ids (n,), characters [start, stop) of each token (n, 2)) for each text."""
        if not isinstance(self.codec, TokenizerCodec):
            for text in texts:
                of_bytes = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
                letter = np.cumsum(of_bytes & 0xC0 != 0x80) - 1
                yield of_bytes, np.stack((letter, letter + 1), 1)
            return
        for encoding in self.codec.tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.asarray(encoding.ids, np.int64), np.asarray(encoding.offsets, np.int64).reshape(-1, 2)


def _find_special(codec: TextCodec, template: ChatTemplate) -> set[int]:
    if not isinstance(codec, TokenizerCodec):
        return set()
    added_tokens = codec.tokenizer.get_added_tokens_decoder().items()
    own = {id for id, token in added_tokens if token.special or token.content.strip()}
    return (own | {_find_id(codec, word) for word in template.special.values()}) - {NONE}


def _find_id(codec: TextCodec, word: str | None) -> int:
    token_id = None if word is None or not isinstance(codec, TokenizerCodec) else codec.tokenizer.token_to_id(word)
    return NONE if token_id is None else token_id
