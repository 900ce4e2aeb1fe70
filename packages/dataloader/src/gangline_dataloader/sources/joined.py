"""Sample order of sources with several parts.

With data.validation_fraction=1, the validation set of a store with a validation part has two parts: the store's own
rows and the rows of its validation part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gangline_dataloader.order.mixture import RowPlace
from gangline_dataloader.sources.split import SplitRows
from gangline_dataloader.sources.windows import SampleOrder


class JoinedOrder:
    """Order of sources that consist of parts: a source's rows are the rows of all its parts, one part after another."""

    end: int | None = None

    def __init__(self, order: SampleOrder, groups: Sequence[Sequence[SplitRows]]) -> None:
        self.order = order
        self._ends = [np.cumsum([part.count for part in parts]) for parts in groups]
        self._first = np.cumsum([0, *map(len, groups)])

    @property
    def deciding(self) -> Any:
        return self.order.deciding

    def __call__(self, numbers: np.ndarray) -> RowPlace:
        place = self.order(numbers)
        source, row = np.empty_like(place.source), np.empty_like(place.row)
        for k in np.unique(place.source).tolist():
            here, ends = place.source == k, self._ends[k]
            part = np.searchsorted(ends, place.row[here], side="right")
            source[here] = self._first[k] + part
            row[here] = place.row[here] - np.concatenate([[0], ends])[part]
        return RowPlace(source, place.epoch, row)


def join_groups(order: SampleOrder, groups: Sequence[Sequence[SplitRows]]) -> SampleOrder:
    """Return an order over the parts of all `groups`; each group of parts is one source of `order`."""
    return order if all(len(parts) == 1 for parts in groups) else JoinedOrder(order, groups)
