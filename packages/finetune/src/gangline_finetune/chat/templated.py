"""Base of `data=chat` and `data=preferences`: rows of a file, rendered and tokenized, in memory.

T tokens per row
"""

from __future__ import annotations

from abc import ABC
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from gangline.data.base import DataSource, Split
from gangline.data.sample import Sample
from gangline_basics.data.answers import RenderedChat
from gangline_basics.data.chat import TemplateRefusal, read_template
from gangline_basics.data.chat_tokens import ChatEncoder, MaskedTokens
from gangline_basics.data.codec import TokenizerCodec
from gangline_finetune.chat.order import RowOrder
from gangline_finetune.chat.rows import read_rows, select_split
from gangline_finetune.chat.tokenizer import find_tokenizer

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.chat.config import TemplatedConfig


@dataclass
class EncodedRows:
    """Rows of a split as lists of tokenized chats. left_out: reason -> number of skipped rows."""

    codec: TokenizerCodec
    rows: list[list[MaskedTokens]]
    left_out: Counter[str] = field(default_factory=Counter)

    def describe_left_out(self) -> str:
        """Describe the skipped rows, as text that starts with a semicolon."""
        return "".join(f"; {count} skipped: {why}" for why, count in self.left_out.items() if count)


def encode_rows(config: TemplatedConfig, run: Run, split: Split) -> EncodedRows:
    """Read, render and tokenize one split. Raises UserError for invalid rows or tokenizers."""
    tokenizer = find_tokenizer(config.tokenizer, run.model.get_weights_directory())
    codec, template = TokenizerCodec(tokenizer, None, "replace"), read_template(tokenizer, config.template)
    rendered: list[list[RenderedChat]] = []
    left_out: Counter[str] = Counter()
    for where, row in select_split(list(read_rows(config.path)), config.validation_fraction, split):
        try:
            rendered.append(config.make_renderer(row, where)(template))
        except TemplateRefusal as error:
            left_out[str(error)] += 1
    chats = iter(ChatEncoder(codec, template)([chat for row in rendered for chat in row]))
    return EncodedRows(codec, [[next(chats) for _ in row] for row in rendered], left_out)


@dataclass(frozen=True)
class FilledRow:
    """Row of chats (documents 0, 1, ...) and then padding (one more document); arrays are (T + 1,).

    filled: number of chat tokens among the first T tokens.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray
    document: np.ndarray
    position: np.ndarray
    filled: int

    def make_sample(self, counts: np.ndarray) -> Sample:
        """Make a sample of the row. counts: loss mask of the sample, (T,)."""
        return {
            "tokens": self.tokens,
            "loss_mask": counts,
            "document": self.document[:-1],
            "position": self.position[:-1],
            "filled": np.asarray(self.filled),
        }


class TemplatedSource(DataSource, ABC):
    """Source of rows of chats in memory. chats: all chats; rows: indices of the chats in each row."""

    def __init__(
        self,
        chats: Sequence[MaskedTokens],
        rows: Sequence[Sequence[int]],
        codec: TokenizerCodec,
        *,
        sequence_length: int,
        seed: int,
        split: str,
        note: str,
    ) -> None:
        self.chats, self.rows, self.codec = chats, rows, codec
        self.sequence_length, self.note = sequence_length, note
        self.order = RowOrder(len(rows), seed, split)
        self._of = (seed, split, sequence_length, codec.identity)

    def fill_row(self, row: int) -> FilledRow:
        """Return row number `row`, filled with its chats and padding."""
        T, numbers, at = self.sequence_length, self.rows[row], 0
        filled_row = FilledRow(
            np.zeros(T + 1, self.codec.dtype),
            np.zeros(T + 1, bool),
            np.full(T + 1, len(numbers)),
            np.zeros(T + 1, np.int64),
            min(T, sum(len(self.chats[number].tokens) for number in numbers)),
        )
        for document, chat in enumerate(self.chats[number] for number in numbers):
            here = slice(at, at := at + len(chat.tokens))
            filled_row.tokens[here], filled_row.loss_mask[here], filled_row.document[here] = (
                chat.tokens,
                chat.loss_mask,
                document,
            )
            filled_row.position[here] = np.arange(len(chat.tokens))
        filled_row.position[at:] = np.arange(T + 1 - at)
        return filled_row

    def count_samples(self) -> int:
        return len(self.rows)

    @cached_property
    def _fingerprint(self) -> str:
        digest = blake2b(repr(self._of).encode(), digest_size=16)
        for chat in self.chats:
            digest.update(len(chat.tokens).to_bytes(8, "little") + chat.tokens.tobytes() + chat.loss_mask.tobytes())
        return digest.hexdigest()

    def compute_fingerprint(self) -> str:
        return self._fingerprint

    def identify_tokenizer(self) -> str:
        return f"{self.codec.identity}, end of text {self.codec.separator}"

    def encode(self, text: str) -> list[int]:
        return self.codec.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.codec.decode(tokens)
