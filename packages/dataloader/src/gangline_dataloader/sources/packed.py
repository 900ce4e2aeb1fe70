"""Rows of whole documents, as a store's plan has packed them (`packing.plan`)."""

from __future__ import annotations

import numpy as np

from gangline.data import BatchReader, DataSource, ReadPlace, Sample
from gangline.errors import UserError
from gangline_dataloader.sources.windows import WindowSource


class PackedSource(WindowSource):
    """As WindowSource, but a row holds the pieces of its plan, one behind another, and then padding.

    Padding never counts in the loss. With `documents` each piece stands alone, and so does the padding; the rest of a
    document that was cut begins at position 0 again.
    """

    def reader(self, place: ReadPlace) -> BatchReader:
        return DataSource.reader(self, place)  # a row is no one window: sample by sample

    def pieces(self, source: int, row: int) -> list[tuple[int, int]]:
        plan = self.parts[source].plan
        assert plan is not None, "every part of a packed source has a plan"
        return [(start, stop) for start, stop in plan.row(row).tolist()]

    def sample(self, i: int) -> Sample:
        end = self.order.end
        if end is not None and i >= end:
            raise UserError(f"the data ends after {end} samples, and sample {i} was asked for.")
        source, row = self.row_of(i)
        store = self.stores[source]
        size = self.sequence_length + 1
        tokens = np.full((1, size), store.end_of_text or 0, store.dtype)
        number, position = np.empty(size, np.int64), np.empty(size, np.int64)
        at = count = 0
        for start, stop in self.pieces(source, row):
            store.windows(np.array([start]), stop - start, tokens[:, at : at + stop - start])
            number[at : at + stop - start], position[at : at + stop - start] = count, np.arange(stop - start)
            at, count = at + stop - start, count + 1
        number[at:], position[at:] = count, np.arange(size - at)
        counts = np.arange(1, size) < at
        if not self.documents:
            return {"tokens": tokens[0], "loss_mask": counts}
        mask = counts & (number[1:] == number[:-1])
        return {"tokens": tokens[0], "loss_mask": mask, "document": number[:-1], "position": position[:-1]}
