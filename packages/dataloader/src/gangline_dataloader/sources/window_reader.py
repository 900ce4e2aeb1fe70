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
from gangline_dataloader.sources.places import Windows

if TYPE_CHECKING:
    from gangline_dataloader.sources.windows import WindowSource

CHUNK = 1 << 18  # tokens that are gathered at once, if a step has no more: half a MiB of uint16, which a cache holds
SLOTS = 3  # chunks: one that is being used, two ahead of it
PLACES = 1 << 11  # samples whose places are computed at once


class WindowReader(BatchReader):
    """Reads for one rank. Tokens stay in stored width, and documents are where they end."""

    def __init__(self, source: WindowSource, place: ReadPlace) -> None:
        self.source, self.place = source, place
        self.steps = max(1, CHUNK // (place.share * source.sequence_length))  # in a chunk
        self._memory = KeptMemory(place.device)
        self._ahead: ReadAhead[Iterator[list[StoredBatch]]] | None = None
        self._chunk: Iterator[list[StoredBatch]] = iter(())
        self._closed = False

    def begin(self, cursor: int, step: int) -> None:
        if self._closed:
            raise RuntimeError("this reader is closed")
        if self._ahead is not None:
            self._ahead.close()
        self._chunk = iter(())
        places = _Places(self.source, self.place, cursor, self.steps)
        self._ahead = ReadAhead(partial(self._gather, places), SLOTS, prepare=partial(use_device, self.place.device))

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
            asked = np.array(numbers)
            (stored,) = self._batches(asked, self.source.places(asked), -1)
            yield replace(stored, counted=counted if counted < len(numbers) else None)

    def close(self) -> None:
        self._closed = True
        self._chunk = iter(())
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _gather(self, places: _Places, chunk: int, slot: int) -> Iterator[list[StoredBatch]]:
        """The steps of a chunk. Where the data ends among them those before are given, and the next one raises."""
        batches = self._batches(*places(chunk), slot)
        each = self.place.microbatches
        return iter([batches[at : at + each] for at in range(0, len(batches), each)])

    def _batches(self, numbers: np.ndarray, windows: Windows, slot: int) -> list[StoredBatch]:
        """Samples (N,) in microbatches, in the memory of that slot."""
        T, B = self.source.sequence_length, self.place.micro_size
        count, N = len(numbers) // B, len(numbers)
        tokens, rows = self._memory((slot, N), (N, T + 1), self.source.stores[0].dtype)
        row, end = self.source.gather(windows, rows)
        samples = torch.from_numpy(numbers).view(count, B).unbind()
        batches = [StoredBatch(*each) for each in zip(tokens.view(count, B, T + 1).unbind(), samples, strict=True)]
        if self.source.documents:
            ends = torch.from_numpy((row % B * T + end).astype(np.int32))
            cuts = np.searchsorted(row, np.arange(0, N + 1, B))
            for stored, each in zip(batches, ends.split(np.diff(cuts).tolist()), strict=True):
                stored.ends = each
        return batches


class _Places:
    """Where the rows of a rank's chunks begin, of several chunks at once: the order costs as much for one sample."""

    def __init__(self, source: WindowSource, place: ReadPlace, cursor: int, steps: int) -> None:
        self.source, self.place, self.cursor = source, place, cursor
        self.rows = steps * place.share  # of a chunk
        self.chunks = max(1, PLACES // self.rows)
        self.steps = steps * self.chunks
        self._numbers = np.empty(0, np.int64)
        self._block: int | None = None

    def __call__(self, chunk: int) -> tuple[np.ndarray, Windows]:
        """(numbers, windows) of the rows of a chunk: of fewer steps at the end of the data.

        Raises UserError where the data ends in its first step.
        """
        block, at = divmod(chunk, self.chunks)
        if block != self._block:
            self._block, self._numbers = block, self._of_steps(block * self.steps)
            self._windows = self.source.places(self._numbers)
        here = slice(at * self.rows, (at + 1) * self.rows)
        numbers = self._numbers[here]
        if not len(numbers):
            raise self.source.used_up(self.cursor + chunk * self.rows * self.place.width)
        return numbers, Windows(self._windows.source[here], self._windows.start[here])

    def _of_steps(self, first: int) -> np.ndarray:
        """The samples of this rank in whole steps from `first` on."""
        size, end = self.place.global_size, self.source.order.end
        left = self.steps if end is None else min(self.steps, max(0, (end - self.cursor) // size - first))
        begins = self.place.first(self.cursor) + (first + np.arange(left)) * size
        return (begins[:, None] + np.arange(self.place.share)).reshape(-1)
