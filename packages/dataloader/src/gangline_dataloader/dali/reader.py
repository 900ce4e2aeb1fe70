"""The reader of `data=dali`: the samples of a source, gathered in a thread, and handed over by a DALI pipeline.

What leaves the host is what is stored: one to four bytes a token, and where documents end. Positions, documents and
masks are derived from that on the device (`gangline.data.expand`), for DALI has no operator that counts along a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gangline.data import BatchReader, ReadAhead, ReadPlace, StoredBatch
from gangline_dataloader.dali.pipeline import StepPipeline
from gangline_dataloader.sources.windows import StoredRows, WindowSource


class DaliReader(BatchReader):
    """`WindowSource.fill` ahead of need, through DALI.

    depth  steps that DALI holds ready
    """

    def __init__(self, source: WindowSource, place: ReadPlace, depth: int) -> None:
        self.source, self.place, self.depth = source, place, depth
        self._ahead: ReadAhead[StoredRows] | None = None
        self._pipeline: StepPipeline | None = None
        self._cursor, self._closed = 0, False

    def begin(self, cursor: int, step: int) -> None:
        if self._closed:
            raise RuntimeError("this reader is closed")
        self._stop()
        self._cursor = cursor
        source, place = self.source, self.place
        memory = np.empty((self.depth + 1, place.share, source.sequence_length + 1), source.dtype)

        def read(n: int, slot: int) -> StoredRows:
            first = place.first(cursor + n * place.global_size)
            return source.fill(np.arange(first, first + place.share), memory[slot])

        ahead = self._ahead = ReadAhead(read, self.depth + 1)
        self._pipeline = StepPipeline(lambda n: ahead.take(), source.dtype, source.masked, place.device, self.depth)

    def take(self) -> list[StoredBatch]:
        if self._pipeline is None:
            raise RuntimeError("this reader is closed" if self._closed else "`begin` comes before `take`")
        found = self._pipeline.take()
        first = self.place.first(self._cursor)
        self._cursor += self.place.global_size
        size, T = self.place.micro_size, self.source.sequence_length
        batches = []
        for start in range(0, self.place.share, size):
            one = StoredBatch(found.tokens[start : start + size], torch.arange(first + start, first + start + size))
            if self.source.documents:
                inside = found.ends[(found.ends > start * T) & (found.ends <= (start + size) * T)]
                one.ends = inside - start * T
            one.loss_mask = None if found.loss_mask is None else found.loss_mask[start : start + size]
            batches.append(one)
        return batches

    def held_out(self, count: int) -> Iterator[StoredBatch]:
        if self._closed:
            raise RuntimeError("this reader is closed")
        for numbers, counted in self.place.held_out(count, self.source.length()):
            found = self.source.fill(np.array(numbers))
            one = StoredBatch(torch.from_numpy(found.tokens), torch.tensor(numbers))
            one.ends = torch.from_numpy(found.ends) if self.source.documents else None
            one.loss_mask = None if found.loss_mask is None else torch.from_numpy(found.loss_mask)
            one.counted = None if counted >= len(numbers) else counted
            yield one

    def close(self) -> None:
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._pipeline = None
