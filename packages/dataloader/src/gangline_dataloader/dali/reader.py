"""The reader of `data=dali`: samples of a source, gathered in a thread and passed through a DALI pipeline.

Tokens are copied to the device in their stored width, one to four bytes each. Position ids, document ids and
masks are computed on the device from the tokens and the document ends (`gangline.data.expand`), because DALI has no
operator that counts along a row.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from gangline.data.read_ahead import ReadAhead
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline_dataloader.dali.pipeline import ChunkPipeline
from gangline_dataloader.sources.chunks import StepChunks, compute_steps_per_chunk, group_steps, split_into_microbatches
from gangline_dataloader.sources.windows import StoredRows, WindowSource


class DaliReader(BatchReader):
    """Batch reader that prefetches `WindowSource.fill` through DALI.

    depth  number of chunks, each of one or more steps, that DALI prefetches
    """

    def __init__(self, source: WindowSource, place: ReadPlace, depth: int) -> None:
        self.source, self.place, self.depth = source, place, depth
        self.steps = compute_steps_per_chunk(source, place)
        self._ahead: ReadAhead[StoredRows] | None = None
        self._pipeline: ChunkPipeline | None = None
        self._chunk: Iterator[list[StoredBatch]] = iter(())
        self._closed = False

    def begin(self, cursor: int, step: int) -> None:
        if self._closed:
            raise RuntimeError("this reader is closed")
        self._stop()
        source, place = self.source, self.place
        chunks, self._taken = StepChunks(source, place, cursor, self.steps), 0
        memory: dict[int, np.ndarray] = {}

        def allocate_rows(slot: int, count: int) -> np.ndarray:
            if len(memory.get(slot, ())) != count:
                memory[slot] = np.empty((count, source.sequence_length + 1), source.dtype)
            return memory[slot]

        def read(chunk: int, slot: int) -> StoredRows:
            return chunks.fill(chunk, lambda count: allocate_rows(slot, count))

        ahead = self._ahead = ReadAhead(read, self.depth + 1)
        self._chunks = chunks
        self._pipeline = ChunkPipeline(lambda n: ahead.take(), source.dtype, source.masked, place.device, self.depth)

    def take(self) -> list[StoredBatch]:
        if self._pipeline is None:
            raise RuntimeError("this reader is closed" if self._closed else "`begin` comes before `take`")
        step = next(self._chunk, None)
        if step is None:
            tensors = self._pipeline.take()
            numbers = self._chunks.get_sample_numbers(self._taken)[: len(tensors.tokens)]
            self._taken += 1
            rest = (tensors.tokens, tensors.ends, tensors.loss_mask, tensors.filled)
            batches = split_into_microbatches(self.source, self.place, numbers, *rest)
            self._chunk = group_steps(batches, self.place)
            step = next(self._chunk)
        return step

    def read_held_out(self, count: int) -> Iterator[StoredBatch]:
        if self._closed:
            raise RuntimeError("this reader is closed")
        for numbers, valid_samples in self.place.iterate_held_out(count, self.source.count_samples()):
            rows = self.source.fill(np.array(numbers))
            mask = None if rows.loss_mask is None else torch.from_numpy(rows.loss_mask)
            tokens = torch.from_numpy(rows.tokens)
            (one,) = split_into_microbatches(
                self.source, self.place, np.array(numbers), tokens, rows.ends, mask, rows.filled
            )
            one.counted = None if valid_samples >= len(numbers) else valid_samples
            yield one

    def close(self) -> None:
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = self._pipeline = None
        self._chunk = iter(())
