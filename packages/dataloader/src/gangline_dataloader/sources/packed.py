"""Data source of packed sequences: rows of complete documents, by a store's pack plan (`packing.pack_plan`)."""

from __future__ import annotations

from abc import ABC
from typing import Any

import numpy as np

from gangline_dataloader.order.mixture import RowPlace
from gangline_dataloader.packing.pack_plan import PackedRows, expand_ranges
from gangline_dataloader.sources.windows import StoredRows, WindowSource, make_loss_mask


class PackedSource(WindowSource, ABC):
    """A WindowSource whose rows hold the pieces of the pack plan, one after another, then padding.

    Padding never contributes to the loss. With `documents`, each piece and the padding is a document of its own; each
    piece of a split document restarts at position 0.
    """

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.masked = True

    def list_token_ranges(self, source: int, row: int) -> list[tuple[int, int]]:
        pieces = self._get_plan(source).locate_rows(np.array([row]))
        return list(zip(pieces.start.tolist(), pieces.stop.tolist(), strict=True))

    def find_row_starts(self, place: RowPlace) -> np.ndarray:
        starts = np.empty(len(place.row), np.int64)
        for k, here in self._group_by_source(place.source):
            pieces = self._get_plan(k).locate_rows(place.row[here])
            starts[here] = pieces.start[np.cumsum(pieces.count) - pieces.count]
        return starts

    def fill(self, numbers: np.ndarray, out: np.ndarray | None = None, place: RowPlace | None = None) -> StoredRows:
        self.look_again()
        numbers, T = np.asarray(numbers, np.int64), self.sequence_length
        N, place = len(numbers), self.look_up_samples(numbers) if place is None else place
        tokens = np.empty((N, T + 1), self.dtype) if out is None else out
        token_mask = np.ones((N, T + 1), np.uint8)
        flat, flat_mask = tokens.reshape(-1), token_mask.reshape(-1)
        borders, paddings, room = [], [], np.full(N, T)
        for k, here in self._group_by_source(place.source):
            store, pieces = self.stores[k], self._get_plan(k).locate_rows(place.row[here])
            first = np.arange(N)[here] * (T + 1)
            at = pieces.compute_offsets(first)
            store.copy(pieces.start, pieces.stop, flat, at)
            if store.masked:
                store.copy_loss_mask(pieces.start, pieces.stop, flat_mask, at)
            ends = at + pieces.stop - pieces.start
            row_ends = ends[np.cumsum(pieces.count) - 1]
            room[here] = np.minimum(row_ends - first, T)
            borders.append(ends)
            paddings.append((expand_ranges(row_ends, first + T + 1 - row_ends), store.end_of_text or 0))
        for places, token in paddings:
            flat[places] = token
        self.check(tokens, place)
        border = np.sort(np.concatenate(borders))  # end of each piece, as offset in the flattened rows of T + 1 tokens
        if self.infill is not None:
            self.infill.apply(tokens, numbers, border)
        for places, token in paddings:  # again, because fill-in-the-middle may have rearranged the padding
            flat[places], flat_mask[places] = token, 0
        row, end = np.divmod(border, T + 1)
        inside = (row * T + end)[end > 0].astype(np.int32) if self.documents else np.empty(0, np.int32)
        return StoredRows(tokens, inside, make_loss_mask(token_mask, inside), room)

    def _group_by_source(self, source: np.ndarray) -> list[tuple[int, np.ndarray | slice]]:
        if len(self.stores) == 1:
            return [(0, slice(None))]
        return [(k, np.flatnonzero(source == k)) for k in np.unique(source).tolist()]

    def _get_plan(self, source: int) -> PackedRows:
        plan = self.parts[source].plan
        assert plan is not None, "every part of a packed source has a pack plan"
        return plan
