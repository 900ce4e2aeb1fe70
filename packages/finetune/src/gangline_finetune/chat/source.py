"""Chats in memory, several packed into a row.

T tokens per row
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gangline import UserError
from gangline.data.base import Split
from gangline.data.sample import Sample
from gangline_basics.data.chat_tokens import MaskedTokens
from gangline_basics.data.codec import TokenizerCodec
from gangline_finetune.chat.packing import pack_best_fit
from gangline_finetune.chat.templated import TemplatedSource, encode_rows

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.chat.config import ChatConfig


class ChatSource(TemplatedSource):
    """Source of rows of T + 1 tokens: complete chats and then padding, each as a separate document.

    A target token is in the loss mask if it is an assistant's token and its input token is in the same chat.
    chats: already truncated to T + 1 tokens.
    """

    def __init__(
        self,
        chats: Sequence[MaskedTokens],
        codec: TokenizerCodec,
        *,
        sequence_length: int,
        seed: int,
        split: str,
        note: str,
    ) -> None:
        packed = pack_best_fit(np.asarray([len(chat.tokens) for chat in chats]), sequence_length + 1)
        super().__init__(chats, packed, codec, sequence_length=sequence_length, seed=seed, split=split, note=note)

    def sample(self, i: int) -> Sample:
        row = self.fill_row(self.order.get_row(i))
        return row.make_sample(row.loss_mask[1:] & (row.document[1:] == row.document[:-1]))

    def describe(self) -> str:
        tokens = sum(len(chat.tokens) for chat in self.chats)
        targets = sum(int(chat.loss_mask[1:].sum()) for chat in self.chats)
        share = tokens / (len(self.rows) * (self.sequence_length + 1))
        return (
            f"{len(self.chats)} chats in {len(self.rows)} rows ({share:.0%} filled), {tokens} tokens, "
            f"{targets} of these tokens in the loss{self.note}"
        )


def build(config: ChatConfig, run: Run, split: Split) -> ChatSource:
    """Read and tokenize one split. Raises UserError if no chat has a target to train on."""
    read, T = encode_rows(config, run, split), run.batch.sequence_length
    chats = [chat for row in read.rows for chat in row]
    long = sum(len(chat.tokens) > T + 1 for chat in chats)
    cut = [MaskedTokens(chat.tokens[: T + 1], chat.loss_mask[: T + 1]) for chat in chats]
    learnable_chats = [chat for chat in cut if chat.loss_mask[1:].any()]
    read.left_out["no assistant tokens within the length of a row"] = len(cut) - len(learnable_chats)
    note = read.describe_left_out()
    if not learnable_chats:
        raise UserError(
            f"data.path={config.path} has no chat with assistant tokens in the {split} split.",
            note.removeprefix("; ")
            or f"data.validation_fraction={config.validation_fraction} leaves no chat for this split.",
            "Add chats to data.path, or increase batch.sequence_length.",
        )
    note += f"; {long} truncated to {T + 1} tokens" if long else ""
    return ChatSource(learnable_chats, read.codec, sequence_length=T, seed=run.seed, split=split, note=note)
