"""Whole steps of windows at once: one gather for each store, instead of one sample after another.

The bytes and their order are those of `WindowSource.sample`. A *chunk* is as many steps as are gathered together: a
thread that woke up for each step would cost as much as the tokens.

B sequences of a microbatch, T tokens, N rows of a chunk
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from gangline.data import BatchReader, KeptMemory, ReadAhead, ReadPlace, StoredBatch, use_device

if TYPE_CHECKING:
    from gangline_dataloader.sources.windows import WindowSource

CHUNK = 1 << 20  # tokens that are gathered at once, if a step has no more
SLOTS = 3  # chunks: one that is being used, two ahead of it


class WindowReader(BatchReader):
    """Reads for one rank. Tokens stay in stored width, and documents are where they end."""

    def __init__(self, source: WindowSource, place: ReadPlace) -> None:
        self.source, self.place = source, place
        most = max(1, CHUNK // (place.share * source.sequence_length))
        self.steps = 1 << most.bit_length() - 1  # in a chunk, a power of two
        self._memory = KeptMemory(place.device)  # of held-out batches
        self._ahead: ReadAhead[Iterator[list[StoredBatch]]] | None = None
        self._chunk: Iterator[list[StoredBatch]] = iter(())
        self._closed = False

    def begin(self, cursor: int, step: int) -> None:
        if self._closed:
            raise RuntimeError("this reader is closed")
        if self._ahead is not None:
            self._ahead.close()
        self._chunk = iter(())
        # A thread that was too slow to end with `close` goes on writing into its own.
        make = partial(self._gather, cursor, KeptMemory(self.place.device))
        self._ahead = ReadAhead(make, SLOTS, prepare=partial(use_device, self.place.device))

    def take(self) -> list[StoredBatch]:
        if self._ahead is None:
            raise RuntimeError("this reader is closed" if self._closed else "`begin` comes before `take`")
        found = next(self._chunk, None)
        if found is None:
            self._chunk = self._ahead.take()
            found = next(self._chunk)
        return found

    def held_out(self, count: int) -> Iterator[StoredBatch]:
        if self._closed:
            raise RuntimeError("this reader is closed")
        for numbers, counted in self.place.held_out(count, self.source.length()):
            (stored,) = self._batches(np.array(numbers), self._memory, -1)
            yield replace(stored, counted=counted if counted < len(numbers) else None)

    def close(self) -> None:
        self._closed = True
        self._chunk = iter(())
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _gather(self, cursor: int, memory: KeptMemory, chunk: int, slot: int) -> Iterator[list[StoredBatch]]:
        """The steps of a chunk. Where the data ends among them those before are given, and the next one raises."""
        grown = self.steps.bit_length() - 1  # chunks of one step, two, four, ...: the first `take` waits for no more
        first = (1 << chunk) - 1 if chunk <= grown else (1 << grown) - 1 + (chunk - grown) * self.steps
        size, end = self.place.global_size, self.source.order.end
        steps = np.arange(first, first + (1 << min(chunk, grown)))
        if end is not None:
            steps = steps[cursor + (steps + 1) * size <= end]
            if not len(steps):
                raise self.source.used_up(cursor + first * size)
        numbers = self.place.first(cursor) + (steps[:, None] * size + np.arange(self.place.share)).reshape(-1)
        batches, each = self._batches(numbers, memory, slot), self.place.microbatches
        return iter([batches[at : at + each] for at in range(0, len(batches), each)])

    def _batches(self, numbers: np.ndarray, memory: KeptMemory, slot: int) -> list[StoredBatch]:
        """Samples (N,) in microbatches, in the memory of that slot."""
        T, B, N = self.source.sequence_length, self.place.micro_size, len(numbers)
        count = N // B
        tokens, rows = memory(slot, (N, T + 1), self.source.dtype)
        found = self.source.fill(numbers, rows)
        samples = torch.from_numpy(numbers).view(count, B).unbind()
        batches = [StoredBatch(*each) for each in zip(tokens.view(count, B, T + 1).unbind(), samples, strict=True)]
        if found.loss_mask is not None:
            masks = torch.from_numpy(found.loss_mask).view(count, B, T).unbind()
            for stored, mask in zip(batches, masks, strict=True):
                stored.loss_mask = mask
        if self.source.documents:
            borders = np.arange(count + 1, dtype=np.int32) * (B * T)
            cuts = np.diff(np.searchsorted(found.ends, borders, side="right"))
            ends = torch.from_numpy(found.ends - np.repeat(borders[:-1], cuts)).split(cuts.tolist())
            for stored, each in zip(batches, ends, strict=True):
                stored.ends = each
        return batches
