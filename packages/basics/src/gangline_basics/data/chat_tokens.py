"""A rendered conversation as tokens, and which of them are learnt. Torch-free.

n tokens of a conversation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gangline_basics.data.answers import RenderedChat
from gangline_basics.data.chat import ChatTemplate
from gangline_basics.data.codec import TextCodec, TokenizerCodec

# The number of the rule below, for what is kept on a disk. 1: all that a template adds with an answer was learnt, the
# line's end behind its end token too, and marks were passed over. 2: what stood behind an answer's words was searched
# for its end, calls of tools too. 3: answers of weight 0 were trained on. 4: so were conversations of which the
# template leaves out the last reasoning. 5: so were those of which it leaves out reasoning beside a call, or in parts.
# 6: the rule below.
LEARNT_RULE = 6
NONE = -1  # no token's number


@dataclass(frozen=True)
class MaskedTokens:
    """tokens (n,), learnt (n,) bool: those that the assistant said."""

    tokens: np.ndarray
    learnt: np.ndarray


class ChatEncoder:
    """Rendered conversations to tokens. Special tokens are those that the template wrote.

    A token is learnt where it holds a letter of an answer, as transformers has it (`return_assistant_tokens_mask`). An
    answer that the template does not mark ends with the last special token of those that the template writes behind
    each answer, or with the tokenizer's eos_token where that is one of them: what follows, such as a line's end or the
    begin of the next turn, is written when no model is asked any more. Special are the tokenizer's added tokens, but
    for those of white space, and those that the template has names for.
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
        """(n,) bool. places (n, 2): [start, stop) of the letters of each token."""
        begins, ends = places.T
        special, mask = np.isin(ids, self._special), np.zeros(len(ids), bool)
        for start, stop, content_stop in chat.answers:
            behind = special & (begins >= content_stop) & (begins < stop)
            end_tokens = behind & (ids == self._end)
            until = ends[end_tokens if end_tokens.any() else behind]
            mask |= (ends > start) & (begins < (until[-1] if len(until) else stop))
        return mask

    def _encode_places(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, their places) of each text."""
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
