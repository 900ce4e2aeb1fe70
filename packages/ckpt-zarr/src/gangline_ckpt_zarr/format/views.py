"""Strided torch and numpy views that show the consecutive chunks of a file as one box of the array.

A grid (g0, g1, ...) of chunks of shape (c0, c1, ...) is a tensor (g0, c0, g1, c1, ...), so a box is copied to or from
any number of chunks in one strided copy, or in a few copies if the box does not fill its last chunks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from gangline_ckpt_zarr.format.chunks import ChunkRun


@dataclass(frozen=True)
class View:
    """A part of a box (`slices`) as (g0, c0, g1, c1, ...): sizes, and strides and offset in elements of the file."""

    slices: tuple[slice, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int


def make_views(run: ChunkRun, itemsize: int) -> Iterator[View]:
    """Yield views that together make up the run's box."""
    chunk_strides, grid_strides = _compute_strides(run.chunk, 1), _compute_strides(run.grid, run.stride // itemsize)
    choices = []
    for length, side in zip(run.box.shape, run.chunk, strict=True):
        full, rest = divmod(length, side)
        choices.append([(0, full, side)] * (full > 0) + [(full, 1, rest)] * (rest > 0))
    for combination in product(*choices):
        slices, sizes, strides, offset = [], [], [], run.base // itemsize
        for (first, chunks, side), chunk, inner, outer in zip(
            combination, run.chunk, chunk_strides, grid_strides, strict=True
        ):
            slices.append(slice(first * chunk, first * chunk + chunks * side))
            sizes += [chunks, side]
            strides += [outer, inner]
            offset += first * outer
        yield View(tuple(slices), tuple(sizes), tuple(strides), offset)


def _compute_strides(shape: tuple[int, ...], unit: int) -> tuple[int, ...]:
    strides = []
    for length in reversed(shape):
        strides.append(unit)
        unit *= length
    return tuple(reversed(strides))
