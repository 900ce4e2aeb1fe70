"""Rows of whole documents, as a store's plan has packed them (`packing.pack_plan`)."""

from __future__ import annotations

from typing import Any

import numpy as np

from gangline_dataloader.order.mixture import RowPlace
from gangline_dataloader.sources.windows import StoredRows, WindowSource


class PackedSource(WindowSource):
    """As WindowSource, but a row holds the pieces of its plan, one behind another, and then padding.

    Padding never counts in the loss. With `documents` each piece stands alone, and so does the padding; the rest of a
    document that was cut begins at position 0 again.
    """

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **named)
        self.masked = True

    def pieces(self, source: int, row: int) -> list[tuple[int, int]]:
        plan = self.parts[source].plan
        assert plan is not None, "every part of a packed source has a plan"
        return [(start, stop) for start, stop in plan.row(row).tolist()]

    def starts(self, place: RowPlace) -> np.ndarray:
        pairs = zip(place.source.tolist(), place.row.tolist(), strict=True)
        return np.array([self.pieces(*one)[0][0] for one in pairs], np.int64)

    def fill(self, numbers: np.ndarray, out: np.ndarray | None = None) -> StoredRows:
        numbers, T = np.asarray(numbers, np.int64), self.sequence_length
        tokens = np.empty((len(numbers), T + 1), self.dtype) if out is None else out
        mask, ends = np.ones((len(numbers), T), bool), []
        place = self.known_rows(numbers)
        for n, (source, row) in enumerate(zip(place.source.tolist(), place.row.tolist(), strict=True)):
            store, at, cuts = self.stores[source], 0, []
            for start, stop in self.pieces(source, row):
                if at:
                    ends.append(n * T + at)
                store.windows(np.array([start]), stop - start, tokens[n : n + 1, at : at + stop - start])
                if store.masked:
                    counted = np.empty((1, stop - start), np.uint8)
                    store.counted(np.array([start]), stop - start, counted)
                    mask[n, max(0, at - 1) : at + stop - start - 1] = counted[0, 0 if at else 1 :]
                at += stop - start
                cuts.append(at)
            if self.infill is not None:
                self.infill.apply(tokens[n, :at], int(numbers[n]), cuts)
            if at <= T:
                tokens[n, at:], mask[n, at - 1 :] = store.end_of_text or 0, False
                ends.append(n * T + at)
        found = np.array(ends if self.documents else (), np.int32)
        if self.documents:
            row, end = np.divmod(found - 1, T)
            mask[row, end] = False
        return StoredRows(tokens, found, mask)
