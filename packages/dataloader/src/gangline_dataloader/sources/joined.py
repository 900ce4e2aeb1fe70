"""The order of sources with several parts: a complete store as validation set also has its validation part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gangline_dataloader.order.mixture import RowPlace
from gangline_dataloader.sources.split import SplitRows
from gangline_dataloader.sources.windows import SampleOrder


class JoinedOrder:
    """An order over the parts of sources: the rows of a source are numbered through its parts, one after another."""

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
    """Return the order of the parts in `groups`; `order` is the order of the groups, each as one source."""
    return order if all(len(parts) == 1 for parts in groups) else JoinedOrder(order, groups)
