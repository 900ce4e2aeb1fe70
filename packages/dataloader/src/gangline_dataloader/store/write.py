"""Writer of the shards of a token store, from documents of tokens."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from gangline_dataloader.store.manifest import ShardEntry, name_ends_file, name_loss_file, name_tokens_file
from gangline_dataloader.store.npy import NpyWriter, compute_sampled_checksum

SHARD_TOKENS = 1 << 26  # 128 MiB of uint16: large enough for efficient requests, small enough to wait for


class ShardWriter:
    """Writer of shard number `number` in `folder`. A document is never split over shards.

    masked  whether to write a loss mask, too
    tag     as in NpyWriter
    """

    def __init__(self, folder: Path, number: int, dtype: str, masked: bool = False, tag: str = "") -> None:
        self._tokens = NpyWriter(folder / name_tokens_file(number), dtype, tag)
        self._ends = NpyWriter(folder / name_ends_file(number), "<u4", tag)
        self._loss = NpyWriter(folder / name_loss_file(number), "|u1", tag) if masked else None

    @property
    def tokens(self) -> int:
        return self._tokens.length

    def write(self, documents: Iterable[np.ndarray]) -> None:
        """Append documents, each an array (n,) of n > 0 tokens, end-of-text token included."""
        arrays = list(documents)
        self.write_run(
            np.concatenate([np.empty(0, np.int64), *arrays]), np.array([len(one) for one in arrays], np.int64)
        )

    def write_run(self, tokens: np.ndarray, lengths: np.ndarray, counted: np.ndarray | None = None) -> None:
        """Append documents: their tokens one after another, their lengths, and the loss mask of their tokens."""
        self._ends.write(self._tokens.length + np.cumsum(lengths))
        if self._loss is not None:
            assert counted is not None, "a shard with a loss mask needs the loss mask of every document"
            self._loss.write(counted)
        self._tokens.write(tokens)

    def close(self) -> ShardEntry:
        """Complete all files and return the shard's entry in the manifest."""
        loss = None if self._loss is None else self._loss.close()
        tokens, ends = self._tokens.close(), self._ends.close()
        pieces = compute_sampled_checksum(self._tokens.path)
        return ShardEntry(self._tokens.length, self._ends.length, tokens, ends, loss, pieces)
