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

CHUNK = 1 << 20  # tokens that are gathered at once, if a step has no more
SLOTS = 3  # chunks: one that is being used, two ahead of it
PLACES = 1 << 11  # samples whose places are computed at once


class WindowReader(BatchReader):
    """Reads for one rank. Tokens stay in stored width, and documents are where they end."""

    def __init__(self, source: WindowSource, place: ReadPlace) -> None:
        self.source, self.place = source, place
        most = max(1, CHUNK // (place.share * source.sequence_length))
        self.steps = 1 << most.bit_length() - 1  # in a chunk, a power of two
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
        places = _Places(self.source, self.place, cursor)
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
        grown = self.steps.bit_length() - 1  # chunks of one step, two, four, ...: the first `take` waits for no more
        first = (1 << chunk) - 1 if chunk <= grown else (1 << grown) - 1 + (chunk - grown) * self.steps
        batches = self._batches(*places(first, 1 << min(chunk, grown)), slot)
        each = self.place.microbatches
        return iter([batches[at : at + each] for at in range(0, len(batches), each)])

    def _batches(self, numbers: np.ndarray, windows: Windows, slot: int) -> list[StoredBatch]:
        """Samples (N,) in microbatches, in the memory of that slot."""
        T, B = self.source.sequence_length, self.place.micro_size
        count, N = len(numbers) // B, len(numbers)
        tokens, rows = self._memory(slot, (N, T + 1), self.source.stores[0].dtype)
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
    """Where the rows of a rank's steps begin, of many steps at once: the order costs as much for one sample."""

    def __init__(self, source: WindowSource, place: ReadPlace, cursor: int) -> None:
        self.source, self.place, self.cursor = source, place, cursor
        self._first = self._stop = 0  # the steps that are known
        self._numbers = np.empty(0, np.int64)

    def __call__(self, step: int, steps: int) -> tuple[np.ndarray, Windows]:
        """(numbers, windows) of the rows of these steps: of fewer at the end of the data.

        Raises UserError where the data ends in the first of them.
        """
        if not self._first <= step <= step + steps <= self._stop:
            self._first, self._stop = step, step + max(steps, PLACES // self.place.share)
            self._numbers = self._of_steps(step, self._stop)
            self._windows = self.source.places(self._numbers)
        here = slice((step - self._first) * self.place.share, (step + steps - self._first) * self.place.share)
        numbers = self._numbers[here]
        if not len(numbers):
            raise self.source.used_up(self.cursor + step * self.place.global_size)
        return numbers, Windows(self._windows.source[here], self._windows.start[here])

    def _of_steps(self, first: int, stop: int) -> np.ndarray:
        """The samples of this rank in whole steps, up to the end of the data."""
        size, end = self.place.global_size, self.source.order.end
        stop = stop if end is None else min(stop, (end - self.cursor) // size)
        begins = self.place.first(self.cursor) + np.arange(first, max(first, stop)) * size
        return (begins[:, None] + np.arange(self.place.share)).reshape(-1)
