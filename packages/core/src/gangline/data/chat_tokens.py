"""A rendered conversation as tokens, and which of them are learnt. Torch-free.

n tokens of a conversation
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gangline.data.answers import RenderedChat
from gangline.data.chat import ChatTemplate
from gangline.data.codec import TextCodec, TokenizerCodec

# The number of the rule below, for what is kept on a disk. 1: all that a template adds with an answer was learnt, the
# line's end behind its end token too, and marks were passed over. 2: as it stands here.
LEARNT_RULE = 2


@dataclass(frozen=True)
class MaskedTokens:
    """tokens (n,), learnt (n,) bool: those that the assistant said."""

    tokens: np.ndarray
    learnt: np.ndarray


class ChatEncoder:
    """Rendered conversations to tokens. Special tokens are those that the template wrote.

    A token is learnt where it holds a letter of an answer, as transformers has it (`return_assistant_tokens_mask`). An
    answer that the template does not mark ends with the last special token behind its words, where there is one: what
    follows that, such as a line's end, is written when no model is asked any more. (The last, for calls of tools stand
    between words and end.) Special are those of the tokenizer, and those that the template has names for.
    """

    def __init__(self, codec: TextCodec, template: ChatTemplate) -> None:
        self.codec, self.template = codec, template
        self._special = np.asarray(sorted(_special(codec, template)), np.int64)

    def __call__(self, chats: Sequence[RenderedChat]) -> list[MaskedTokens]:
        encoded = zip(chats, self._placed([chat.text for chat in chats]), strict=True)
        return [MaskedTokens(ids.astype(self.codec.dtype), self._learnt(chat, ids, at)) for chat, (ids, at) in encoded]

    def _learnt(self, chat: RenderedChat, ids: np.ndarray, places: np.ndarray) -> np.ndarray:
        """(n,) bool. places (n, 2): [start, stop) of the letters of each token."""
        begins, ends = places.T
        special, learnt = np.isin(ids, self._special), np.zeros(len(ids), bool)
        for start, stop, said in chat.answers:
            behind = ends[special & (begins >= said) & (begins < stop)]
            learnt |= (ends > start) & (begins < (behind[-1] if len(behind) else stop))
        return learnt

    def _placed(self, texts: list[str]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, their places) of each text."""
        if not isinstance(self.codec, TokenizerCodec):
            for text in texts:
                of_bytes = np.frombuffer(text.encode(), np.uint8).astype(np.int64)
                letter = np.cumsum(of_bytes & 0xC0 != 0x80) - 1
                yield of_bytes, np.stack((letter, letter + 1), 1)
            return
        for found in self.codec.tokenizer.encode_batch(texts, add_special_tokens=False):
            yield np.asarray(found.ids, np.int64), np.asarray(found.offsets, np.int64).reshape(-1, 2)


def _special(codec: TextCodec, template: ChatTemplate) -> set[int]:
    if not isinstance(codec, TokenizerCodec):
        return set()
    own = {id for id, token in codec.tokenizer.get_added_tokens_decoder().items() if token.special}
    named = {codec.tokenizer.token_to_id(word) for word in template.special.values()}
    return own | {id for id in named if id is not None}
