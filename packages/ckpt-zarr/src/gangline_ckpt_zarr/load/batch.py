"""Read batches: byte ranges of a file, read in one call, checked while in the CPU cache, and copied to their targets;
a bad chunk raises BadCheckpoint.

If there are free cores, several batches run in parallel: reading and checking both release Python's lock.
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

BATCH = 1 << 20  # bytes per batch of a local store: small enough for a core's own cache, large enough for a system call
FAR = 128 << 20  # bytes per batch of a remote store, where each batch costs the time of a request
GAP = 4096  # maximum bytes between two ranges that are read as one: reading them is cheaper than one more call
MOST_LANES = 4  # maximum number of parallel batches: more are not faster, because memory is the limit

_nothing = memoryview(bytearray(GAP))


class Destination(Protocol):
    """Receiver of the values of a box."""

    def put(self, part: Box, values: np.ndarray) -> None: ...


class ReadBatch:
    """Ranges of a checkpoint's file that are read in one call."""

    def __init__(self, store: ObjectStore, path: str, meta: Meta) -> None:
        self.store, self.path, self.meta = store, path, meta
        self._scratch = memoryview(b"")
        self.clear()

    def clear(self) -> None:
        self.size = 0
        self._ranges: list[tuple[int, list[memoryview]]] = []
        self._end = -1  # offset in the file after the last range
        self._used = 0  # number of bytes of scratch memory in use
        self._checks: list[tuple[ChunkRun, int, memoryview, memoryview]] = []
        self._puts: list[tuple[Destination, Box, np.ndarray]] = []

    def allocate_scratch(self, nbytes: int) -> memoryview:
        """Return scratch memory, valid until this batch is done. Later batches reuse it, so it stays in cache."""
        start = -(-self._used // 64) * 64
        if start + nbytes > len(self._scratch):
            self._scratch, start = np.empty(max(nbytes, 2 * BATCH), np.uint8).data, 0
        self._used = start + nbytes
        return self._scratch[start : self._used]

    def add_range(self, start: int, buffer: memoryview) -> None:
        """Add the range at offset `start` of the file, to read into `buffer`. Calls must be in file order."""
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
        """Add a complete chunk and its trailer, to be read and checked."""
        start, trailer = run.base + number * run.stride, memoryview(bytearray(self.meta.trailer))
        self.add_range(start, buffer)
        self.add_range(start + run.nbytes, trailer)
        self._checks.append((run, number, buffer, trailer))

    def copy(self, target: Destination, part: Box, values: np.ndarray) -> None:
        """Add values to copy to `target` once all ranges are read and all chunks are good."""
        self._puts.append((target, part, values))

    def read_and_check(self, read: Read) -> None:
        """Read all ranges, check all chunks, then copy. Raises BadCheckpoint, which names array, box and file."""
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
        """Return the error to raise for a failed read, which names the first chunk that cannot be read."""
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
    """Runner of the batches of one file, in order or in parallel. All batches are done when the context exits."""

    def __init__(self, store: ObjectStore, path: str, meta: Meta) -> None:
        self.limit = BATCH if store.local else FAR
        self._store, self._path, self._file = store, path, ExitStack()
        self._pool = _get_pool() if store.local else None  # a remote store fetches in parallel by itself
        self._free = [ReadBatch(store, path, meta) for _ in range(1 if self._pool is None else count_lanes() + 1)]
        self._busy: deque[tuple[ReadBatch, Future[None]]] = deque()
        self._read: Read | None = None

    def batch(self) -> ReadBatch:
        """Return an empty batch. Raises the error of an earlier batch."""
        if not self._free:
            batch, over = self._busy.popleft()
            self._free.append(batch)
            over.result()
        batch = self._free.pop()
        batch.clear()
        return batch

    def send(self, batch: ReadBatch) -> None:
        """Run a batch, now or in a thread. Raises BadCheckpoint; `batch` or the exit raises errors of threads."""
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
        errors = [error for _, over in self._busy if (error := over.exception()) is not None]  # waits for each batch
        self._file.close()
        if errors and kind is None:
            raise errors[0]


def count_lanes() -> int:
    """Return the number of batches that run in parallel: cores per rank of this machine, at most `MOST_LANES`."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_LANES, cores // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))


@cache
def _get_pool() -> ThreadPoolExecutor | None:
    return ThreadPoolExecutor(count_lanes(), thread_name_prefix="load") if count_lanes() > 1 else None
