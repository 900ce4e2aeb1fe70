"""The sample order of one source: each epoch is another permutation of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np

from gangline_dataloader.order.epochs import SourceEpochs, grow_sizes
from gangline_dataloader.order.mixture import Ingredient, RowPlace


class SingleOrder:
    """The order of one source: sample i of the run is sample i of the source, as in a mixture with only this source."""

    end: int | None = None

    def __init__(self, source: Ingredient, *key: object) -> None:
        self.source, self.key = source, key
        self.rows = np.array([source.rows], np.int64)
        self.epochs = SourceEpochs(source.rows, source.span, *key, source.name, sizes=source.sizes)

    @property
    def deciding(self) -> list[list[int]]:
        """Return the JSON value that, with the shuffle key, determines the order.

        Its form is [[first sample, rows per epoch from that sample on], ...].
        """
        return [list(size) for size in self.epochs.sizes]

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        epoch, row = self.epochs(np.asarray(numbers, np.int64))
        return RowPlace(np.zeros_like(epoch), epoch, row)

    def resume_after(self, sizes: Sequence[Sequence[int]], cursor: int) -> SingleOrder:
        """Return this order for a run resumed at `cursor`, with `sizes` up to there; the next epoch has all rows."""
        return SingleOrder(replace(self.source, sizes=grow_sizes(sizes, self.source.rows, cursor)), *self.key)


class TextOrder:
    """The order of `data=text` of gangline-basics, to compare runs on equal tokens: O(rows) in time and memory."""

    end: int | None = None

    def __init__(self, rows: int, seed: int, split: str) -> None:
        self.rows, self.seed, self.split = np.array([rows], np.int64), seed, split
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def deciding(self) -> list[list[int]]:
        """Return the JSON value that, with the shuffle key, determines the order: [[0, rows per epoch]]."""
        return [[0, int(self.rows[0])]]

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        epoch, index = np.divmod(np.asarray(numbers, np.int64), self.rows[0])
        row = np.empty_like(index)
        for one in np.unique(epoch):
            row[epoch == one] = self._get_permutation(int(one))[index[epoch == one]]
        return RowPlace(np.zeros_like(epoch), epoch, row)

    def _get_permutation(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            key = blake2b(f"{self.seed}\0{self.split}\0{epoch}".encode(), digest_size=16).digest()
            draws = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(int(self.rows[0]))
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: np.argsort(draws, kind="stable")}
        return self._epochs[epoch]
