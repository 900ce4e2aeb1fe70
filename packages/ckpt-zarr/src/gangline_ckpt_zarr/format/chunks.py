"""Offset of each chunk: a file stores the boxes of one rank, and every offset in the file follows from the boxes.

A box of the registry is stored as a chunk run: all chunks of the array's chunk grid inside the box, equal in size and
in C order. A chunk is `nbytes` bytes of raw little-endian elements, then their checksum (4 bytes), as zarr's codecs
store them. Chunk k starts at `base + k * stride`. Chunks of 1 MiB or more are page-aligned, so that O_DIRECT can write
and read them.

In a packed file a seal (4 bytes) follows the checksum: see `checksum`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import prod

from gangline.shard import Box, Registry
from gangline_ckpt_zarr.format.checksum import TRAILER
from gangline_ckpt_zarr.format.chunk_shape import chunk_shape
from gangline_ckpt_zarr.format.dtypes import count_itemsize

PAGE = 4096


def _round_up(value: int, to: int) -> int:
    return -(-value // to) * to


@dataclass(frozen=True)
class ChunkRun:
    """One box of one array in a file, as a run of chunks. `chunk`: shape of each chunk."""

    name: str
    box: Box
    chunk: tuple[int, ...]
    nbytes: int  # bytes of a chunk, without its trailer of checksum and seal
    stride: int
    base: int

    @cached_property
    def grid(self) -> tuple[int, ...]:
        """Number of chunks along each dim."""
        return tuple(-(-length // side) for length, side in zip(self.box.shape, self.chunk, strict=True))

    @property
    def count(self) -> int:
        return prod(self.grid)

    @property
    def end(self) -> int:
        return self.base + self.count * self.stride

    def split(self, limit: int) -> Iterator[ChunkRun]:
        """Yield the parts of this chunk run, themselves chunk runs, each of at most `limit` bytes or of one chunk."""
        depth, inner = len(self.grid), 1
        while depth and inner * self.grid[depth - 1] * self.stride <= limit:
            depth -= 1
            inner *= self.grid[depth]
        if not depth:
            yield self
            return
        most, length = max(1, limit // (inner * self.stride)), self.grid[depth - 1]
        starts = product(*(range(chunks) for chunks in self.grid[: depth - 1]), range(0, length, most))
        rest, sides, ends = len(self.grid) - depth, self.chunk, self.box.shape
        for outer in starts:
            first = (*outer, *(0 for _ in range(rest)))
            after = (*(i + 1 for i in outer[:-1]), min(outer[-1] + most, length), *self.grid[depth:])
            low = tuple(i * side for i, side in zip(first, sides, strict=True))
            high = (min(i * side, end) for i, side, end in zip(after, sides, ends, strict=True))
            number = 0
            for at, chunks in zip(first, self.grid, strict=True):
                number = number * chunks + at
            offset = tuple(start + at for start, at in zip(self.box.offset, low, strict=True))
            box = Box(offset, tuple(end - at for end, at in zip(high, low, strict=True)))
            yield replace(self, box=box, base=self.base + number * self.stride)

    def index(self, number: int) -> tuple[int, ...]:
        """Return the index of a chunk in the grid of the full array."""
        digits: list[int] = []
        for length in reversed(self.grid):
            number, at = divmod(number, length)
            digits.append(at)
        first = (start // side for start, side in zip(self.box.offset, self.chunk, strict=True))
        return tuple(a + b for a, b in zip(first, reversed(digits), strict=True))

    def chunk_box(self, number: int) -> Box:
        """Return the box of the array in one chunk, without the chunk's padding beyond the array's end."""
        offset = tuple(i * side for i, side in zip(self.index(number), self.chunk, strict=True))
        sides = zip(offset, self.chunk, self.box.limits, strict=True)
        return Box(offset, tuple(min(side, stop - at) for at, side, (_, stop) in sides))

    def find_chunk_ranges(self, wanted: Box) -> Iterator[tuple[int, int]]:
        """Yield (first, count) of each range of consecutive chunks that overlap a box."""
        ranges = []
        for start, length, side, chunks, at, n in zip(
            wanted.offset, wanted.shape, self.chunk, self.grid, self.box.offset, self.box.shape, strict=True
        ):
            low, high = max(start, at) - at, min(start + length, at + n) - at
            if high <= low:
                return
            ranges.append((low // side, min(chunks, -(-high // side))))
        if not ranges:
            yield 0, 1
            return
        depth = len(ranges)  # from dim `depth` on, all chunks overlap, so they are consecutive
        while depth > 1 and ranges[depth - 1] == (0, self.grid[depth - 1]):
            depth -= 1
        inner = prod(self.grid[depth:])
        first, last = ranges[depth - 1]
        for outer in product(*(range(*bounds) for bounds in ranges[: depth - 1])):
            number = 0
            for at, chunks in zip((*outer, first), self.grid, strict=False):
                number = number * chunks + at
            yield number * inner, (last - first) * inner


@dataclass(frozen=True)
class RankFile:
    """File that one rank writes."""

    runs: tuple[ChunkRun, ...]
    size: int
    dtypes: dict[str, str]  # torch dtype by array

    @cached_property
    def by_box(self) -> dict[tuple[str, tuple[int, ...]], ChunkRun]:
        return {(run.name, run.box.offset): run for run in self.runs}

    def find_size_error(self, there: int) -> str:
        """Return why a file of `there` bytes is damaged; "" if its size is right."""
        return "" if there == self.size else f"has {there:,} bytes instead of {self.size:,}"


def lay_out(boxes: Iterable[tuple[str, str, tuple[int, ...], Box]]) -> RankFile:
    """Return the file that stores these boxes, each (array name, dtype, chunk shape, box), one after another."""
    runs, end, dtypes = [], 0, {}
    for name, dtype, chunk, box in boxes:
        nbytes = prod(chunk) * count_itemsize(dtype)
        align = PAGE if nbytes >= 1 << 20 else 64 if nbytes >= 1 << 16 else 8
        base = _round_up(end, max(align, 64))
        run = ChunkRun(name, box, chunk, nbytes, _round_up(nbytes + TRAILER, align), base)
        runs.append(run)
        dtypes[name] = dtype
        end = run.end
    return RankFile(tuple(runs), _round_up(end, PAGE), dtypes)


class CheckpointFiles(ABC):
    """Files of a checkpoint by rank, each computed when first requested. `chunks`: known chunk shapes by array."""

    def __init__(self, registry: Registry, chunks: dict[str, tuple[int, ...]] | None = None) -> None:
        self.registry = registry
        self._chunks = dict(chunks or {})
        self._files: dict[int, RankFile] = {}

    def chunk(self, name: str) -> tuple[int, ...]:
        """Return the chunk shape of an array."""
        if name not in self._chunks:
            self._chunks[name] = chunk_shape(self.registry[name])
        return self._chunks[name]

    def get_rank_file(self, rank: int) -> RankFile:
        """Return the file of a rank; it has no runs if the rank writes nothing."""
        if rank not in self._files:
            self._files[rank] = self._lay_out(rank)
        return self._files[rank]

    @abstractmethod
    def _lay_out(self, rank: int) -> RankFile: ...
