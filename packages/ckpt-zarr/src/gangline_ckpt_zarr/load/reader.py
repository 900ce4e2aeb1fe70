"""Reader of stored chunks: each byte is read once, if possible directly into its target, and checked while in cache.

A chunk that is completely inside the wanted box is read directly into the target; of other chunks, the wanted part is
copied from a scratch buffer. With `verify`, complete chunks are read, because a checksum covers a complete chunk.
Without `verify`, only the bytes from the first to the last wanted element are read.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gangline.shard import Box
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.chunks import ChunkRun
from gangline_ckpt_zarr.format.dtypes import map_dtype
from gangline_ckpt_zarr.load.batch import ReadBatch, ReadLanes
from gangline_ckpt_zarr.load.read_plan import ReadItem, Target, plan_reads
from gangline_ckpt_zarr.stores.base import ObjectStore


class ChunkReader:
    """Reader of the planned items of one file."""

    def __init__(self, meta: Meta, path: str, store: ObjectStore, verify: bool = True) -> None:
        self.meta, self.path, self.store, self.verify = meta, path, store, verify

    def read(self, items: Iterable[ReadItem]) -> None:
        """Fill the targets of the items. Raises BadCheckpoint, which names array, box and file."""
        with ReadLanes(self.store, self.path, self.meta) as lanes:
            batch = lanes.batch()
            for item in items:
                run, target = item.run, item.target
                dtype = np.dtype(map_dtype(self.meta.registry[run.name].dtype))
                rows = WantedRows(run, target, dtype) if run.chunk and run.count == run.grid[0] else None
                for number in range(item.first, item.first + item.count):
                    if rows is not None:
                        self._add_rows(batch, rows, number)
                    else:
                        self._add_part(batch, run, number, target, dtype)
                    if batch.size >= lanes.limit:
                        lanes.send(batch)
                        batch = lanes.batch()
            lanes.send(batch)

    def _add_rows(self, batch: ReadBatch, rows: WantedRows, number: int) -> None:
        """Add the wanted rows of chunk `number` to a batch, for a run whose chunks split its box along dim 0 only."""
        run, low = rows.run, number * rows.run.chunk[0]
        first, last = max(low, rows.first), min(low + run.chunk[0], rows.last)
        start, skipped = run.base + number * run.stride, (first - low) * rows.nbytes
        memory = rows.memory and rows.memory[(first - rows.first) * rows.nbytes : (last - rows.first) * rows.nbytes]
        if memory and last - first == run.chunk[0]:
            if self.verify:
                batch.chunk(run, number, memory)
            else:
                batch.add_range(start, memory)
        elif memory and not self.verify:
            batch.add_range(start + skipped, memory)
        elif last > first:
            scratch = batch.allocate_scratch(run.nbytes)
            if self.verify:
                batch.chunk(run, number, scratch)
            else:
                end = (last - low) * rows.nbytes
                batch.add_range(start + skipped, scratch[skipped:end])
            values = np.frombuffer(scratch, rows.dtype).reshape(run.chunk)[
                (slice(first - low, last - low), *rows.inner)
            ]
            batch.copy(rows.target, rows.get_box(first, last), values)

    def _add_part(self, batch: ReadBatch, run: ChunkRun, number: int, target: Target, dtype: np.dtype) -> None:
        """Add the part of chunk `number` that a target wants to a batch."""
        start, chunk_box = run.base + number * run.stride, run.chunk_box(number)
        part = chunk_box.intersect(target.box) if chunk_box.shape else chunk_box
        if part is None:
            return
        straight = _find_direct_memory(run, part, target, dtype)
        if straight is not None and not self.verify:
            batch.add_range(start + _count_skipped(run, chunk_box, part) * dtype.itemsize, straight)
        elif straight is not None and part.shape == run.chunk:
            batch.chunk(run, number, straight)
        else:
            scratch = batch.allocate_scratch(run.nbytes)
            if self.verify:
                batch.chunk(run, number, scratch)
            else:
                first = _count_skipped(run, chunk_box, part) * dtype.itemsize
                last = _count_skipped(run, chunk_box, _get_last_element(part)) * dtype.itemsize + dtype.itemsize
                batch.add_range(start + first, scratch[first:last])
            values = np.frombuffer(scratch, dtype).reshape(run.chunk)
            batch.copy(target, part, _view(values, part, Box(chunk_box.offset, run.chunk)))


def read_target(meta: Meta, store: ObjectStore, target: Target) -> None:
    """Fill one target from a checkpoint at the root of a store, with every chunk checked. Raises BadCheckpoint."""
    for rank, items in plan_reads(meta, [target]).items():
        ChunkReader(meta, meta.get_file_path(rank), store).read(items)


class WantedRows:
    """Rows that a target needs from a chunk run whose chunks split the run's box along dim 0 only.

    Computed once for all chunks of the run. `memory`: memory of the target for rows `first` to `last` of the run's box;
    None if the memory is not contiguous, if only parts of the rows are needed, or if the target has another dtype.
    """

    def __init__(self, run: ChunkRun, target: Target, dtype: np.dtype) -> None:
        self.run, self.target, self.dtype = run, target, dtype
        start, common = run.box.offset, run.box.intersect(target.box)
        assert common is not None, "every run of a read plan overlaps its target"
        self._common = common
        self.first = common.offset[0] - start[0]
        self.last = self.first + common.shape[0]
        self.nbytes = run.nbytes // run.chunk[0]  # bytes of a row
        self.inner = tuple(
            slice(at - base, at - base + length)
            for at, base, length in zip(common.offset[1:], start[1:], common.shape[1:], strict=True)
        )
        self.memory: memoryview | None = None
        if not target.bits and target.array.dtype == dtype and common.shape[1:] == run.chunk[1:]:
            memory = target.array[common.slice_within(target.box)]
            self.memory = _view_bytes(memory) if memory.flags.c_contiguous else None

    def get_box(self, first: int, last: int) -> Box:
        """Return rows `first` to `last` as a box of the array."""
        offset, shape = self._common.offset, self._common.shape
        return Box((self.run.box.offset[0] + first, *offset[1:]), (last - first, *shape[1:]))


def _find_direct_memory(run: ChunkRun, part: Box, target: Target, dtype: np.dtype) -> memoryview | None:
    """Return the target's memory for `part` if `part` is contiguous in that memory and in its chunk; else None."""
    if target.bits or target.array.dtype != dtype:
        return None
    split = next((dim for dim, length in enumerate(part.shape) if length != 1), len(part.shape))
    if part.shape[split + 1 :] != run.chunk[split + 1 :]:
        return None
    memory = _view(target.array, part, target.box)
    return _view_bytes(memory) if memory.flags.c_contiguous else None


def _count_skipped(run: ChunkRun, stored: Box, part: Box) -> int:
    """Return the number of elements of a chunk before the first element of `part`; `stored`: box of the chunk."""
    before = 0
    for at, start, side in zip(part.offset, stored.offset, run.chunk, strict=True):
        before = before * side + at - start
    return before


def _get_last_element(part: Box) -> Box:
    """Return the last element of a part, as a box."""
    ends = (start + length - 1 for start, length in zip(part.offset, part.shape, strict=True))
    return Box(tuple(ends), (1,) * len(part.shape))


def _view(array: np.ndarray, part: Box, of: Box) -> np.ndarray:
    """Return the view of `part` in an array that holds the box `of`; also for 0-d arrays."""
    place: Any = (*part.slice_within(of), ...)
    return array[place]


def _view_bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
