"""The epochs of one source: each epoch has each row once, in a different order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gangline_dataloader.order.permutation import SpanPermutation

Sizes = tuple[tuple[int, int], ...]  # (sample number in the source, rows of each epoch from this sample on), ...


class SourceEpochs:
    """The row order of one source: its sample n is row `permutation(n mod rows)` of epoch `n // rows`.

    rows, span, key  as in SpanPermutation
    sizes            history of a source that grew during a run: an epoch keeps the rows that it began with, and the
                     next epoch has all rows, so that no epoch repeats or omits a row; None: the source did not grow
    """

    def __init__(self, rows: int, span: int | None, *key: object, sizes: Sizes | None = None) -> None:
        self.sizes = sizes or ((0, rows),)
        self._orders = [SpanPermutation(each, span, *key) for _, each in self.sizes]
        self._starts, self._rows = (np.array(column, np.int64) for column in zip(*self.sizes, strict=True))
        # number of epochs before each entry of `sizes`
        self._before = np.concatenate([[0], np.cumsum(np.diff(self._starts) // self._rows[:-1])])

    def __call__(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (epoch, row), both (N,) int64, of the source's samples `numbers` (N,) int64."""
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
        """Return the number of samples in the first `epochs` epochs."""
        size = int(np.searchsorted(self._before, epochs, side="right")) - 1
        return int(self._starts[size]) + (epochs - int(self._before[size])) * int(self._rows[size])


def grow_sizes(sizes: Sequence[Sequence[int]], rows: int, samples: int) -> Sizes:
    """Return a source's size history: `sizes` for the first `samples` samples, then `rows` from the next epoch on."""
    read = [(int(start), int(each)) for start, each in sizes if start <= samples]
    start, each = read[-1]
    begins = start - (start - samples) // each * each  # first sample of the next epoch
    if begins == start:  # no sample has been read with the last size
        read.pop()
    if not read or read[-1][1] != rows:
        read.append((begins, rows))
    return tuple(read)
