"""Chats in memory, several to a row.

T tokens of a row
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline.data import (
    DataSource,
    Sample,
    Split,
    TemplateRefusal,
    TokenizerCodec,
    messages_of,
    template_of,
)
from gangline_finetune.chat.encode import MaskedTokens, encode, tokenizer_of
from gangline_finetune.chat.order import RowOrder
from gangline_finetune.chat.packing import best_fit
from gangline_finetune.chat.rows import field_of, of_split, rows
from gangline_finetune.chat.template import Rendered, rendered

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.chat.config import ChatConfig


class ChatSource(DataSource):
    """Rows of T + 1 tokens: whole chats, then padding, each a document of its own.

    A target counts where the assistant said it and its input is of the same chat. chats: cut to T + 1 tokens already.
    """

    def __init__(
        self,
        chats: Sequence[MaskedTokens],
        codec: TokenizerCodec,
        *,
        sequence_length: int,
        seed: int,
        split: str,
        told: str,
    ) -> None:
        self.chats, self.codec, self.sequence_length, self.told = chats, codec, sequence_length, told
        self.rows = best_fit(np.asarray([len(chat.tokens) for chat in chats]), sequence_length + 1)
        self.order = RowOrder(len(self.rows), seed, split)
        self._of = (seed, split, sequence_length, codec.identity)

    def sample(self, i: int) -> Sample:
        T = self.sequence_length
        pieces = [self.chats[number] for number in self.rows[self.order.row(i)]]
        tokens = np.zeros(T + 1, self.codec.dtype)
        learnt = np.zeros(T + 1, bool)
        document = np.full(T + 1, len(pieces))
        position = np.zeros(T + 1, np.int64)
        at = 0
        for number, piece in enumerate(pieces):
            stop = at + len(piece.tokens)
            tokens[at:stop], learnt[at:stop], document[at:stop] = piece.tokens, piece.learnt, number
            position[at:stop] = np.arange(stop - at)
            at = stop
        position[at:] = np.arange(T + 1 - at)
        return {
            "tokens": tokens,
            "loss_mask": learnt[1:] & (document[1:] == document[:-1]),
            "document": document[:-1],
            "position": position[:-1],
        }

    def length(self) -> int:
        return len(self.rows)

    @cached_property
    def _fingerprint(self) -> str:
        digest = blake2b(repr(self._of).encode(), digest_size=16)
        for chat in self.chats:
            digest.update(len(chat.tokens).to_bytes(8, "little") + chat.tokens.tobytes() + chat.learnt.tobytes())
        return digest.hexdigest()

    def fingerprint(self) -> str:
        return self._fingerprint

    def describe(self) -> str:
        tokens = sum(len(chat.tokens) for chat in self.chats)
        learnt = sum(int(chat.learnt[1:].sum()) for chat in self.chats)
        filled = tokens / (len(self.rows) * (self.sequence_length + 1))
        return (
            f"{len(self.chats)} chats in {len(self.rows)} rows ({filled:.0%} filled), {tokens} tokens, "
            f"{learnt} of them learnt{self.told}"
        )

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.codec.decode(tokens)


def build(config: ChatConfig, run: Run, split: Split) -> ChatSource:
    """Read and tokenize one split. Raises UserError where nothing is left to learn."""
    tokenizer = tokenizer_of(config.tokenizer, run.model.pretrained())
    codec, template = TokenizerCodec(tokenizer, None, "replace"), template_of(tokenizer, config.template)
    texts: list[Rendered] = []
    left_out: Counter[str] = Counter()
    for where, row in of_split(list(rows(config.path)), config.validation_fraction, split):
        try:
            texts.append(rendered(template, messages_of(field_of(row, config.field, where), f"data.path: {where}")))
        except TemplateRefusal as error:
            left_out[str(error)] += 1
    room = run.batch.sequence_length + 1
    chats = encode(codec, texts)
    long = sum(len(chat.tokens) > room for chat in chats)
    cut = [MaskedTokens(chat.tokens[:room], chat.learnt[:room]) for chat in chats]
    kept = [chat for chat in cut if chat.learnt[1:].any()]
    left_out["nothing that the assistant says is within a row"] = len(cut) - len(kept)
    told = "".join(f"; {count} left out: {why}" for why, count in left_out.items() if count)
    if not kept:
        raise UserError(
            f"data.path={config.path} has nothing to learn for {split}.",
            told.removeprefix("; ") or f"data.validation_fraction={config.validation_fraction} leaves no chat.",
            "Give it more chats, or a longer batch.sequence_length.",
        )
    told += f"; {long} cut at {room} tokens" if long else ""
    T = run.batch.sequence_length
    return ChatSource(kept, codec, sequence_length=T, seed=run.seed, split=split, told=told)
