"""Rows of whole documents, as a store's plan has packed them (`packing.pack_plan`)."""

from __future__ import annotations

from abc import ABC
from typing import Any

import numpy as np

from gangline_dataloader.order.mixture import RowPlace
from gangline_dataloader.packing.pack_plan import PackedRows, ranges
from gangline_dataloader.sources.windows import StoredRows, WindowSource, mask_of


class PackedSource(WindowSource, ABC):
    """As WindowSource, but a row holds the pieces of its plan, one behind another, and then padding.

    Padding never counts in the loss. With `documents` each piece stands alone, and so does the padding; the rest of a
    document that was cut begins at position 0 again.
    """

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.masked = True

    def pieces(self, source: int, row: int) -> list[tuple[int, int]]:
        found = self._plan(source).pieces(np.array([row]))
        return list(zip(found.start.tolist(), found.stop.tolist(), strict=True))

    def starts(self, place: RowPlace) -> np.ndarray:
        starts = np.empty(len(place.row), np.int64)
        for k, here in self._group_by_source(place.source):
            found = self._plan(k).pieces(place.row[here])
            starts[here] = found.start[np.cumsum(found.count) - found.count]
        return starts

    def fill(self, numbers: np.ndarray, out: np.ndarray | None = None, place: RowPlace | None = None) -> StoredRows:
        self.look_again()
        numbers, T = np.asarray(numbers, np.int64), self.sequence_length
        N, place = len(numbers), self.lookup_rows(numbers) if place is None else place
        tokens = np.empty((N, T + 1), self.dtype) if out is None else out
        learnt = np.ones((N, T + 1), np.uint8)
        flat, flat_learnt = tokens.reshape(-1), learnt.reshape(-1)
        borders, paddings, room = [], [], np.full(N, T)
        for k, here in self._group_by_source(place.source):
            store, found = self.stores[k], self._plan(k).pieces(place.row[here])
            first = np.arange(N)[here] * (T + 1)
            at = found.places(first)
            store.copy(found.start, found.stop, flat, at)
            if store.masked:
                store.copy_learnt(found.start, found.stop, flat_learnt, at)
            ends = at + found.stop - found.start
            filled = ends[np.cumsum(found.count) - 1]
            room[here] = np.minimum(filled - first, T)
            borders.append(ends)
            paddings.append((ranges(filled, first + T + 1 - filled), store.end_of_text or 0))
        for places, token in paddings:
            flat[places] = token
        self.check(tokens, place)
        border = np.sort(np.concatenate(borders))  # behind each piece, in all rows of T + 1 tokens
        if self.infill is not None:
            self.infill.apply(tokens, numbers, border)
        for places, token in paddings:  # last, so that it is no text to be filled in
            flat[places], flat_learnt[places] = token, 0
        row, end = np.divmod(border, T + 1)
        inside = (row * T + end)[end > 0].astype(np.int32) if self.documents else np.empty(0, np.int32)
        return StoredRows(tokens, inside, mask_of(learnt, inside), room)

    def _group_by_source(self, source: np.ndarray) -> list[tuple[int, np.ndarray | slice]]:
        if len(self.stores) == 1:
            return [(0, slice(None))]
        return [(k, np.flatnonzero(source == k)) for k in np.unique(source).tolist()]

    def _plan(self, source: int) -> PackedRows:
        plan = self.parts[source].plan
        assert plan is not None, "every part of a packed source has a plan"
        return plan
