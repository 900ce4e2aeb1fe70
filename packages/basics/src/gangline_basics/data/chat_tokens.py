"""A rendered conversation as tokens, and the mask of the tokens that are trained on. Torch-free.

n tokens of a conversation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gangline_basics.data.answers import RenderedChat
from gangline_basics.data.chat import ChatTemplate
from gangline_basics.data.codec import TextCodec, TokenizerCodec

# Version of the loss mask below, for caches on a disk. 1: all text that a template adds with an answer was trained on,
# with the newline after its end token, and marks were ignored. 2: the text after an answer's content was searched
# for its end, with tool calls. 3: answers of weight 0 were trained on. 4: so were conversations of which the
# template leaves out the last reasoning. 5: so were conversations without reasoning next to a call, or in parts.
# 6: the rule below.
LEARNT_RULE = 6
NONE = -1  # not a token id


@dataclass(frozen=True)
class MaskedTokens:
    """Tokens (n,) of a conversation, and a mask (n,) bool: True for the assistant's answers, which are trained on."""

    tokens: np.ndarray
    learnt: np.ndarray


class ChatEncoder:
    """Encoder of rendered conversations to tokens and loss masks. The special tokens are those that the template wrote.

    A token is trained on if it holds a letter of an answer, as in transformers (`return_assistant_tokens_mask`). An
    answer that the template does not mark ends with the last special token that the template writes after each answer,
    or with the tokenizer's eos_token if it is among these tokens. Text after that, such as a newline or the beginning
    of the next turn, is written when the model is not generating. Special are the tokenizer's added tokens, except
    white space, and the tokens that the template has names for.
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
        """Return the mask of tokens to train on, (n,) bool. places (n, 2): [start, stop) of each token's letters."""
        begins, ends = places.T
        special, mask = np.isin(ids, self._special), np.zeros(len(ids), bool)
        for start, stop, content_stop in chat.answers:
            behind = special & (begins >= content_stop) & (begins < stop)
            end_tokens = behind & (ids == self._end)
            until = ends[end_tokens if end_tokens.any() else behind]
            mask |= (ends > start) & (begins < (until[-1] if len(until) else stop))
        return mask

    def _encode_places(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield (tokens, their places) of each text: ids (n,), and [start, stop) of each token's letters (n, 2)."""
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
