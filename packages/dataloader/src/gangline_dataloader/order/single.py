"""The order of one source: each epoch a fresh permutation of its rows."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from gangline_dataloader.order.mixture import Ingredient, RowPlace
from gangline_dataloader.order.permutation import SpanPermutation

Sizes = tuple[tuple[int, int], ...]  # (first sample, rows of an epoch from there on)


class SingleOrder:
    """Sample i is row `permutation(i mod rows)` of epoch `i // rows`: what a mixture of this source alone would be.

    sizes  of a source that grew while a run read it: an epoch under way keeps the rows that it began with, and the next
           one has them all, so that no epoch shows a row twice or leaves one out
    """

    end: int | None = None

    def __init__(self, source: Ingredient, *key: object, sizes: Sizes | None = None) -> None:
        self.source, self.key, self.sizes = source, key, sizes or ((0, source.rows),)
        self.rows = np.array([source.rows], np.int64)
        self._orders = [SpanPermutation(rows, source.span, *key, source.name) for _, rows in self.sizes]
        self._starts = np.array([start for start, _ in self.sizes], np.int64)
        self._rows = np.array([rows for _, rows in self.sizes], np.int64)
        self._epochs = np.concatenate([[0], np.cumsum(np.diff(self._starts) // self._rows[:-1])])  # before each size

    @property
    def deciding(self) -> list[list[int]]:
        """What the order is a function of, beside its key: JSON."""
        return [list(size) for size in self.sizes]

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        numbers = np.asarray(numbers, np.int64)
        size = np.searchsorted(self._starts, numbers, side="right") - 1
        epoch, index = np.divmod(numbers - self._starts[size], self._rows[size])
        epoch += self._epochs[size]
        row = np.empty_like(index)
        for one in np.unique(size):
            here = size == one
            row[here] = self._orders[one](index[here], epoch[here])
        return RowPlace(np.zeros_like(epoch), epoch, row)

    def after(self, sizes: Sequence[Sequence[int]], cursor: int) -> SingleOrder:
        """The order of a run that had these sizes up to sample `cursor`: this source's own from its next epoch on."""
        read = [(int(start), int(rows)) for start, rows in sizes if start <= cursor]
        start, rows = read[-1]
        begins = start - (start - cursor) // rows * rows  # the epoch under way is over
        if begins == start:  # nothing was read of the last one
            read.pop()
        if not read or read[-1][1] != self.source.rows:
            read.append((begins, self.source.rows))
        return SingleOrder(self.source, *self.key, sizes=tuple(read))


class TextOrder:
    """The order of core's `data=text`, to show that the same tokens give the same run: O(rows) in time and memory."""

    end: int | None = None

    def __init__(self, rows: int, seed: int, split: str) -> None:
        self.rows, self.seed, self.split = np.array([rows], np.int64), seed, split
        self._epochs: dict[int, np.ndarray] = {}

    @property
    def deciding(self) -> list[list[int]]:
        """What the order is a function of, beside its key: JSON."""
        return [[0, int(self.rows[0])]]

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        epoch, index = np.divmod(np.asarray(numbers, np.int64), self.rows[0])
        row = np.empty_like(index)
        for one in np.unique(epoch):
            row[epoch == one] = self._epoch(int(one))[index[epoch == one]]
        return RowPlace(np.zeros_like(epoch), epoch, row)

    def _epoch(self, epoch: int) -> np.ndarray:
        if epoch not in self._epochs:
            key = blake2b(f"{self.seed}\0{self.split}\0{epoch}".encode(), digest_size=16).digest()
            draws = np.random.Philox(key=np.frombuffer(key, "<u8")).random_raw(int(self.rows[0]))
            self._epochs = {**dict(list(self._epochs.items())[-1:]), epoch: np.argsort(draws, kind="stable")}
        return self._epochs[epoch]
