"""Batch reader that prefetches many steps at once in a thread, with bytes and order as in `WindowSource.sample`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from gangline.data.read_ahead import ReadAhead
from gangline.data.reader import BatchReader, ReadPlace, StoredBatch
from gangline.data.sample_reader import KeptMemory, use_device
from gangline_dataloader.sources.chunks import StepChunks, compute_steps_per_chunk, group_steps, split_into_microbatches

if TYPE_CHECKING:
    from gangline_dataloader.sources.windows import WindowSource

SLOTS = 3  # chunks in memory: one in use, two prefetched


class WindowReader(BatchReader):
    """Batch reader of one rank. Tokens keep their stored width, and documents are given by their ends."""

    def __init__(self, source: WindowSource, place: ReadPlace) -> None:
        self.source, self.place = source, place
        self.steps = compute_steps_per_chunk(source, place)
        self._memory = KeptMemory(place.device)  # memory of held-out batches
        self._ahead: ReadAhead[Iterator[list[StoredBatch]]] | None = None
        self._chunk: Iterator[list[StoredBatch]] = iter(())
        self._closed = False

    def begin(self, cursor: int, step: int) -> None:
        if self._closed:
            raise RuntimeError("this reader is closed")
        if self._ahead is not None:
            self._ahead.close()
        self._chunk = iter(())
        chunks = StepChunks(self.source, self.place, cursor, self.steps)
        # Each `begin` allocates memory: a thread that outlived `close` may still write into the previous memory.
        make = partial(self._gather, chunks, KeptMemory(self.place.device))
        self._ahead = ReadAhead(make, SLOTS, prepare=partial(use_device, self.place.device))

    def take(self) -> list[StoredBatch]:
        if self._ahead is None:
            raise RuntimeError("this reader is closed" if self._closed else "`begin` comes before `take`")
        step = next(self._chunk, None)
        if step is None:
            self._chunk = self._ahead.take()
            step = next(self._chunk)
        return step

    def read_held_out(self, count: int) -> Iterator[StoredBatch]:
        if self._closed:
            raise RuntimeError("this reader is closed")
        shape = (self.place.micro_size, self.source.sequence_length + 1)
        for numbers, valid_samples in self.place.iterate_held_out(count, self.source.count_samples()):
            tokens, rows = self._memory("held out", shape, self.source.dtype)
            stored_rows = self.source.fill(np.array(numbers), rows)
            mask = None if stored_rows.loss_mask is None else torch.from_numpy(stored_rows.loss_mask)
            rest = (tokens, stored_rows.ends, mask, stored_rows.filled)
            (batch,) = split_into_microbatches(self.source, self.place, np.array(numbers), *rest)
            yield replace(batch, counted=valid_samples if valid_samples < len(numbers) else None)

    def close(self) -> None:
        self._closed = True
        self._chunk = iter(())
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _gather(self, chunks: StepChunks, memory: KeptMemory, chunk: int, slot: int) -> Iterator[list[StoredBatch]]:
        T, dtype = self.source.sequence_length, self.source.dtype
        stored_rows = chunks.fill(chunk, lambda rows: memory(slot, (rows, T + 1), dtype)[1])
        tokens, _ = memory(slot, stored_rows.tokens.shape, dtype)
        mask = None if stored_rows.loss_mask is None else torch.from_numpy(stored_rows.loss_mask)
        numbers = chunks.get_sample_numbers(chunk)[: len(stored_rows.tokens)]
        batches = split_into_microbatches(
            self.source, self.place, numbers, tokens, stored_rows.ends, mask, stored_rows.filled
        )
        return group_steps(batches, self.place)
