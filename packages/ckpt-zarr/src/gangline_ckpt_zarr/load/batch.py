"""Ranges of a file that are read at once, checked while they are in the cache, and copied on where they must be.

Where cores are to spare, several batches are under way side by side: reading and checking both let Python's lock go.
"""

from __future__ import annotations

import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Protocol

import numpy as np

from gangline import BadCheckpoint
from gangline.shard import Box
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.checksum import checksum_of
from gangline_ckpt_zarr.format.chunks import ChunkRun
from gangline_ckpt_zarr.stores.base import ObjectStore, Read

BATCH = 1 << 20  # bytes: small enough for a core's own cache, large enough for a system call
FAR = 128 << 20  # bytes, where each batch costs the time that a request takes
GAP = 4096  # bytes: to read these for nothing is cheaper than one more call
MOST_LANES = 4  # memory is not faster than these

_nothing = memoryview(bytearray(GAP))


class Destination(Protocol):
    """Where values are wanted."""

    def put(self, part: Box, values: np.ndarray) -> None: ...


class ReadBatch:
    """What is read in one go of a file of a checkpoint."""

    def __init__(self, store: ObjectStore, path: str, meta: Meta) -> None:
        self.store, self.path, self.meta = store, path, meta
        self._scratch = memoryview(b"")
        self.clear()

    def clear(self) -> None:
        self.size = 0
        self._ranges: list[tuple[int, list[memoryview]]] = []
        self._end = -1  # of the last range, in the file
        self._used = 0  # of the scratch memory
        self._checks: list[tuple[ChunkRun, int, memoryview, memoryview]] = []
        self._puts: list[tuple[Destination, Box, np.ndarray]] = []

    def allocate_scratch(self, nbytes: int) -> memoryview:
        """Memory that is this batch's until it is done; the same for every batch that follows, so it stays cached."""
        start = -(-self._used // 64) * 64
        if start + nbytes > len(self._scratch):
            self._scratch, start = np.empty(max(nbytes, 2 * BATCH), np.uint8).data, 0
        self._used = start + nbytes
        return self._scratch[start : self._used]

    def add_range(self, start: int, buffer: memoryview) -> None:
        """Read what lies at `start` of the file; calls go up in the file."""
        gap = start - self._end
        if self._ranges and 0 <= gap <= GAP:
            buffers = self._ranges[-1][1]
            if gap:
                buffers.append(_nothing[:gap])
            buffers.append(buffer)
        else:
            self._ranges.append((start, [buffer]))
        self._end = start + len(buffer)
        self.size += len(buffer)

    def chunk(self, run: ChunkRun, number: int, buffer: memoryview) -> None:
        """Read a whole chunk and its trailer, and check it."""
        start, trailer = run.base + number * run.stride, memoryview(bytearray(self.meta.trailer))
        self.add_range(start, buffer)
        self.add_range(start + run.nbytes, trailer)
        self._checks.append((run, number, buffer, trailer))

    def copy(self, target: Destination, part: Box, values: np.ndarray) -> None:
        """Once all is read and found good, values go on to where they are wanted."""
        self._puts.append((target, part, values))

    def read_and_check(self, read: Read) -> None:
        """Raises BadCheckpoint, naming array, box and file."""
        if not self._ranges:
            return
        try:
            read(self._ranges)
        except (EOFError, OSError) as error:
            raise self.explain_failure(error) from error
        for run, number, buffer, trailer in self._checks:
            if why := self.meta.find_chunk_error(run, number, checksum_of(buffer), trailer):
                raise self._make_chunk_error(run, number, why)
        for target, part, values in self._puts:
            target.put(part, values)

    def explain_failure(self, error: Exception) -> BadCheckpoint:
        """The damage behind a failed read, with the first chunk that cannot be had."""
        for run, number, buffer, trailer in self._checks:
            try:
                self.store.read_into(self.path, [(run.base + number * run.stride, [buffer, trailer])])
            except (EOFError, OSError):
                return self._make_chunk_error(run, number, str(error))
        return BadCheckpoint("every array", None, f"{self.store.url}/{self.path}", str(error))

    def _make_chunk_error(self, run: ChunkRun, number: int, why: str) -> BadCheckpoint:
        box = run.chunk_box(number)
        return BadCheckpoint(run.name, box.limits, f"{self.store.url}/{self.path}", why)


class ReadLanes:
    """Batches of one file, done in order or side by side. All are over when the context is left."""

    def __init__(self, store: ObjectStore, path: str, meta: Meta) -> None:
        self.limit = BATCH if store.local else FAR
        self._store, self._path, self._file = store, path, ExitStack()
        self._pool = _get_pool() if store.local else None  # a far store fetches side by side by itself
        self._free = [ReadBatch(store, path, meta) for _ in range(1 if self._pool is None else count_lanes() + 1)]
        self._busy: deque[tuple[ReadBatch, Future[None]]] = deque()
        self._read: Read | None = None

    def batch(self) -> ReadBatch:
        """An empty batch. Raises what an earlier one raised."""
        if not self._free:
            batch, over = self._busy.popleft()
            self._free.append(batch)
            over.result()
        batch = self._free.pop()
        batch.clear()
        return batch

    def send(self, batch: ReadBatch) -> None:
        """Do it, now or soon. Raises BadCheckpoint, also of a batch that was sent before."""
        if self._read is None:
            try:
                self._read = self._file.enter_context(self._store.open_reader(self._path))
            except OSError as error:
                raise batch.explain_failure(error) from error
        if self._pool is None:
            self._free.append(batch)
            batch.read_and_check(self._read)
        else:
            self._busy.append((batch, self._pool.submit(batch.read_and_check, self._read)))

    def __enter__(self) -> ReadLanes:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        errors = [error for _, over in self._busy if (error := over.exception()) is not None]  # waits for each
        self._file.close()
        if errors and kind is None:
            raise errors[0]


def count_lanes() -> int:
    """How many batches are done at once: by as many cores as each rank of this machine has."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_LANES, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@cache
def _get_pool() -> ThreadPoolExecutor | None:
    return ThreadPoolExecutor(count_lanes(), thread_name_prefix="load") if count_lanes() > 1 else None
