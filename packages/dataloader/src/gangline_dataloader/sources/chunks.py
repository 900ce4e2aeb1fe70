"""Chunks of steps that are read together: the samples of a chunk, and its split into microbatches.

Waking a thread or executing a DALI pipeline for every step would cost as much as reading the step's tokens.

B sequences of a microbatch, T tokens, N rows of a chunk
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from gangline.data.reader import ReadPlace, StoredBatch
from gangline_dataloader.order.mixture import RowPlace

if TYPE_CHECKING:
    from gangline_dataloader.sources.windows import StoredRows, WindowSource

CHUNK = 1 << 22  # maximum tokens of a chunk, unless a single step has more; three chunks are in memory
GROUP = 4  # number of chunks that are located in one call, which costs as much as a call for one chunk
# if reading a chunk fails within this many seconds, its steps are read one by one; a later failure is probably a fetch
# timeout and is raised
PATIENCE = 5.0


class StepChunks:
    """Chunks 0, 1, 2, ... of the steps from sample `cursor` on, read in order.

    The chunks have 1, 2, 4, ... steps, up to `steps` (a power of two), so that the first `WindowReader.take` waits for
    one step only.
    """

    def __init__(self, source: WindowSource, place: ReadPlace, cursor: int, steps: int) -> None:
        self.source, self.place, self.cursor = source, place, cursor
        self._grown = steps.bit_length() - 1
        self._failed: Exception | None = None
        self._places: dict[int, RowPlace] = {}

    def get_sample_numbers(self, chunk: int) -> np.ndarray:
        """Return the sample numbers of a chunk, (N,); fewer at the end of the data. Raises UserError past the end."""
        doublings, size, end = self._grown, self.place.global_size, self.source.order.end
        first = (1 << chunk) - 1 if chunk <= doublings else (1 << doublings) - 1 + (chunk - doublings << doublings)
        steps = np.arange(first, first + (1 << min(chunk, doublings)))
        if end is not None:
            steps = steps[self.cursor + (steps + 1) * size <= end]
            if not len(steps):
                raise self.source.explain_end(self.cursor + first * size)
        return self.place.find_first(self.cursor) + (steps[:, None] * size + np.arange(self.place.share)).reshape(-1)

    def fill(self, chunk: int, memory: Callable[[int], np.ndarray]) -> StoredRows:
        """Read the next chunk into `memory(number of rows)`.

        If a step cannot be read, returns the steps before that step, and the next call raises the error. Raises the
        error at once if the first step cannot be read, or if the chunk failed after more than `PATIENCE` seconds.
        """
        if self._failed is not None:
            raise self._failed
        numbers, start = self.get_sample_numbers(chunk), time.monotonic()
        try:
            return self.source.fill(numbers, memory(len(numbers)), self._locate_samples(chunk, numbers))
        except Exception:
            if len(numbers) == self.place.share or time.monotonic() - start > PATIENCE:
                raise
        good, failure = 0, None
        for step in numbers.reshape(-1, self.place.share):
            try:
                self.source.fill(step)
            except Exception as error:
                failure = error
                break
            good += len(step)
        if failure is not None and not good:
            raise failure
        self._failed = failure
        return self.source.fill(numbers[:good], memory(good))

    def _locate_samples(self, chunk: int, numbers: np.ndarray) -> RowPlace | None:
        """Locate a chunk's samples (N,), for `GROUP` chunks at once; None: `WindowSource.fill` locates them."""
        if self.source.distant or chunk < self._grown or self.source.order.end is not None:
            return None
        if chunk not in self._places:
            count = len(numbers)
            places = self.source.locate_samples(
                np.concatenate([self.get_sample_numbers(chunk + n) for n in range(GROUP)])
            )
            for n in range(GROUP):
                here = slice(n * count, (n + 1) * count)
                self._places[chunk + n] = RowPlace(places.source[here], places.epoch[here], places.row[here])
        return self._places.pop(chunk)


def compute_steps_per_chunk(source: WindowSource, place: ReadPlace) -> int:
    """Compute the number of steps in a full chunk, a power of two, from the tokens of a step on this rank."""
    most = max(1, CHUNK // (place.share * source.sequence_length))
    return 1 << most.bit_length() - 1


def split_into_microbatches(
    source: WindowSource,
    place: ReadPlace,
    numbers: np.ndarray,
    tokens: torch.Tensor,
    ends: np.ndarray,
    loss_mask: torch.Tensor | None,
    filled: np.ndarray | None,
) -> list[StoredBatch]:
    """Split samples `numbers` (N,) and their data, as in StoredRows, into microbatches."""
    T, B, N = source.sequence_length, place.micro_size, len(numbers)
    count = N // B
    samples = torch.from_numpy(numbers).view(count, B).unbind()
    batches = [StoredBatch(*each) for each in zip(tokens.view(count, B, T + 1).unbind(), samples, strict=True)]
    if loss_mask is not None:
        for batch, mask in zip(batches, loss_mask.view(count, B, T).unbind(), strict=True):
            batch.loss_mask = mask
    if filled is not None:
        for batch, rooms in zip(batches, torch.from_numpy(filled).view(count, B).unbind(), strict=True):
            batch.filled = rooms
    if source.documents:
        borders = np.arange(count + 1, dtype=np.int32) * (B * T)
        cuts = np.diff(np.searchsorted(ends, borders, side="right"))
        of_batch = torch.from_numpy(ends - np.repeat(borders[:-1], cuts)).split(cuts.tolist())
        for batch, each in zip(batches, of_batch, strict=True):
            batch.ends = each
    return batches


def group_steps(batches: list[StoredBatch], place: ReadPlace) -> Iterator[list[StoredBatch]]:
    """Group microbatches by step and return an iterator over the steps."""
    each = place.microbatches
    return iter([batches[at : at + each] for at in range(0, len(batches), each)])
