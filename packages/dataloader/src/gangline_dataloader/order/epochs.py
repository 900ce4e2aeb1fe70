"""One source, epoch after epoch: each shows each row once, in an order of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gangline_dataloader.order.permutation import SpanPermutation

Sizes = tuple[tuple[int, int], ...]  # (first number, rows of an epoch from there on)


class SourceEpochs:
    """What a source gives as number n is row `permutation(n mod rows)` of epoch `n // rows`.

    rows, span, key  those of SpanPermutation
    sizes            of a source that grew while a run read it: an epoch under way keeps the rows that it began with,
                     and the next one has them all, so that no epoch shows a row twice or leaves one out
    """

    def __init__(self, rows: int, span: int | None, *key: object, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or ((0, rows),)
        self._orders = [SpanPermutation(each, span, *key) for _, each in self.sizes]
        self._starts, self._rows = (np.array(column, np.int64) for column in zip(*self.sizes, strict=True))
        self._before = np.concatenate([[0], np.cumsum(np.diff(self._starts) // self._rows[:-1])])  # epochs

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(epoch, row), both (N,) int64, of what it gives as `numbers` (N,) int64."""
        if len(self.sizes) == 1:
            epoch, index = np.divmod(numbers, self._rows[0])
            return epoch, self._orders[0](index, epoch)
        size = np.searchsorted(self._starts, numbers, side="right") - 1
        epoch, index = np.divmod(numbers - self._starts[size], self._rows[size])
        epoch += self._before[size]
        row = np.empty_like(index)
        for one in np.unique(size):
            here = size == one
            row[here] = self._orders[one](index[here], epoch[here])
        return epoch, row

    def end(self, epochs: int) -> int:
        """How many numbers so many epochs have."""
        size = int(np.searchsorted(self._before, epochs, side="right")) - 1
        return int(self._starts[size]) + (epochs - int(self._before[size])) * int(self._rows[size])


def grow_sizes(sizes: Sequence[Sequence[int]], rows: int, samples: int) -> Sizes:
    """The sizes of a source that had `sizes` when it had given so many, and has `rows` now: from its next epoch on."""
    read = [(int(start), int(each)) for start, each in sizes if start <= samples]
    start, each = read[-1]
    begins = start - (start - samples) // each * each  # the epoch under way is over
    if begins == start:  # nothing was given of the last one
        read.pop()
    if not read or read[-1][1] != rows:
        read.append((begins, rows))
    return tuple(read)
