"""From stored cells into memory: each byte read once, straight to where it belongs, and checked while it is in cache.

A cell that lies wholly in the wanted part goes into it without a detour; of others what is wanted is copied out of a
scratch buffer. With checksums whole cells are read, for a checksum is of the whole; without, what is wanted alone where
it is one piece.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from crc32c import crc32c

from gangline.errors import BadCheckpoint
from gangline.shard import Box
from gangline_ckpt_zarr.format import overlap
from gangline_ckpt_zarr.format.cells import Run
from gangline_ckpt_zarr.format.grid import stored_dtype
from gangline_ckpt_zarr.format.metadata import Meta
from gangline_ckpt_zarr.format.seal import wrong

BATCH = 4 << 20  # bytes read before they are checked: they are still in the cache then


class Source(Protocol):
    """What a store can do that matters here."""

    url: str

    def read_into(self, path: str, ranges: Sequence[tuple[int, Sequence[memoryview]]]) -> None: ...


@dataclass(frozen=True)
class Target:
    """A wanted box of an array and the memory for it; `bits`: the memory is the 16 bits of bfloat16, as int16."""

    name: str
    box: Box
    array: np.ndarray
    bits: bool = False

    def put(self, part: Box, values: np.ndarray) -> None:
        """Store the values of a part of the box."""
        if self.bits:
            values = (values.view(np.uint32) >> 16).astype(np.uint16).view(np.int16)
        self.array[part.within(self.box)] = values


@dataclass(frozen=True)
class Piece:
    """Neighbouring cells of a file that a target wants."""

    run: Run
    first: int
    count: int
    target: Target


def plan(meta: Meta, targets: Iterable[Target]) -> dict[int, list[Piece]]:
    """What to read of which rank's file, in the file's order."""
    pieces: dict[int, list[Piece]] = defaultdict(list)
    for target in targets:
        for rank, box in overlap.meeting(meta.registry, target.name, target.box):
            run = meta.files.of_rank(rank).by_box[target.name, box.offset]
            pieces[rank] += [Piece(run, first, count, target) for first, count in run.meeting(target.box)]
    for of_rank in pieces.values():
        of_rank.sort(key=lambda piece: piece.run.base + piece.first * piece.run.stride)
    return pieces


class Reader:
    """Reads the pieces of one file."""

    def __init__(self, meta: Meta, path: str, store: Source, verify: bool = True) -> None:
        self.meta, self.path, self.store, self.verify = meta, path, store, verify
        self.file = f"{store.url}/{path}"
        self._gap = memoryview(bytearray(4096))
        self._sealed: tuple[Run, int | None] | None = None  # the run seen last, and what its seals start from
        self._clear()

    def _clear(self) -> None:
        self._ranges: list[tuple[int, list[memoryview]]] = []
        self._end = -1  # of the last range, in the file
        self._size = 0
        self._checks: list[tuple[Run, int, memoryview, memoryview]] = []
        self._puts: list[tuple[Target, Box, np.ndarray]] = []

    def read(self, pieces: Iterable[Piece]) -> None:
        """Fill the targets. Raises BadCheckpoint, naming array, box and file."""
        for piece in pieces:
            run, numbers = piece.run, range(piece.first, piece.first + piece.count)
            rows = self._rows(run, piece.target) if self.verify else None
            for number in numbers:
                if rows is not None and number in rows[0]:
                    at = (number - rows[0].start) * run.nbytes
                    self._cell(run, number, rows[1][at : at + run.nbytes])
                else:
                    self._add(run, number, piece.target)
                if self._size >= BATCH:
                    self._flush()
        self._flush()

    def _rows(self, run: Run, target: Target) -> tuple[range, memoryview] | None:
        """The cells that lie one behind another in the target's memory, and that memory: found once for all of them."""
        inner = run.chunk[1:]
        if not run.chunk or target.bits or target.array.dtype != self._dtype(run):
            return None
        if inner != run.box.shape[1:] or inner != target.box.shape[1:]:
            return None
        side, start = run.chunk[0], target.box.offset[0] - run.box.offset[0]
        low, high = max(0, start), min(run.box.shape[0], start + target.box.shape[0])
        cells = range(-(-low // side), high // side)
        memory = target.array[cells.start * side - start : cells.stop * side - start]
        return (cells, _bytes(memory)) if cells and memory.flags.c_contiguous else None

    def _dtype(self, run: Run) -> np.dtype:
        return np.dtype(stored_dtype(self.meta.registry[run.name].dtype))

    def _cell(self, run: Run, number: int, buffer: memoryview) -> None:
        """Read a whole cell with its checksum and seal."""
        start, trailer = run.base + number * run.stride, memoryview(bytearray(self.meta.trailer))
        self._want(start, buffer)
        self._want(start + run.nbytes, trailer)
        self._checks.append((run, number, buffer, trailer))

    def _add(self, run: Run, number: int, target: Target) -> None:
        start, dtype = run.base + number * run.stride, self._dtype(run)
        stored = run.cell_box(number)
        part = stored.overlap(target.box) if stored.shape else stored
        if part is None:
            return
        straight = self._straight(run, part, target, dtype)
        if straight is not None and not self.verify:
            self._want(start + self._skipped(run, stored, part, dtype), straight)
        elif straight is not None and part.shape == run.chunk:
            self._cell(run, number, straight)
        else:
            scratch = np.empty(run.chunk, dtype)
            if self.verify:
                self._cell(run, number, _bytes(scratch))
            else:
                self._want(start, _bytes(scratch))
            self._puts.append((target, part, _part(scratch, part, Box(stored.offset, run.chunk))))

    def _straight(self, run: Run, part: Box, target: Target, dtype: np.dtype) -> memoryview | None:
        """The target's own memory for a part, where the part is one piece both there and in its cell."""
        if target.bits or target.array.dtype != dtype:
            return None
        split = next((dim for dim, length in enumerate(part.shape) if length != 1), len(part.shape))
        if part.shape[split + 1 :] != run.chunk[split + 1 :]:
            return None
        memory = _part(target.array, part, target.box)
        return _bytes(memory) if memory.flags.c_contiguous else None

    @staticmethod
    def _skipped(run: Run, stored: Box, part: Box, dtype: np.dtype) -> int:
        """Bytes of a cell before a part of it."""
        before = 0
        for at, start, side in zip(part.offset, stored.offset, run.chunk, strict=True):
            before = before * side + at - start
        return before * dtype.itemsize

    def _want(self, start: int, buffer: memoryview) -> None:
        gap = start - self._end
        if self._ranges and 0 <= gap <= len(self._gap):
            if gap:
                self._ranges[-1][1].append(self._gap[:gap])
            self._ranges[-1][1].append(buffer)
        else:
            self._ranges.append((start, [buffer]))
        self._end = start + len(buffer)
        self._size += len(buffer)

    def _flush(self) -> None:
        if not self._ranges:
            return
        try:
            self.store.read_into(self.path, self._ranges)
        except (EOFError, OSError) as error:
            raise self._bad(error) from error
        for run, number, buffer, trailer in self._checks:
            if why := wrong(self._seal_start(run), number, crc32c(buffer), trailer):
                raise BadCheckpoint(run.name, _limits(run.cell_box(number)), self.file, why)
        for target, part, values in self._puts:
            target.put(part, values)
        self._clear()

    def _seal_start(self, run: Run) -> int | None:
        if self._sealed is None or self._sealed[0] is not run:
            self._sealed = run, self.meta.seal_start(run)
        return self._sealed[1]

    def _bad(self, error: Exception) -> BadCheckpoint:
        """The damage behind a failed read, with the first cell that cannot be had."""
        for run, number, buffer, trailer in self._checks:
            try:
                self.store.read_into(self.path, [(run.base + number * run.stride, [buffer, trailer])])
            except (EOFError, OSError):
                return BadCheckpoint(run.name, _limits(run.cell_box(number)), self.file, str(error))
        return BadCheckpoint("every array", None, self.file, str(error))


def _limits(box: Box) -> tuple[tuple[int, int], ...]:
    return tuple((start, start + length) for start, length in zip(box.offset, box.shape, strict=True))


def _part(array: np.ndarray, part: Box, of: Box) -> np.ndarray:
    """A part of what an array holds, as a view, also where it has no dims."""
    place: Any = (*part.within(of), ...)
    return array[place]


def _bytes(array: np.ndarray) -> memoryview:
    return array.reshape(-1).view(np.uint8).data
