"""Chunks of a file as numbers alone, for code that checks and writes them without knowing arrays. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from gangline_ckpt_zarr.format.checksum import CHECKSUM, TRAILER

if TYPE_CHECKING:
    from gangline_ckpt_zarr.format.chunks import ChunkRun


class ChunkSpan(NamedTuple):
    """`number` chunks, the k-th at `base` + k * `stride`: `nbytes` bytes, then their crc32c (4 bytes).

    If `seal` is given, a seal (4 bytes) that starts from it follows, and `first` is the number of the first of these
    chunks in their box; see `format.checksum`.
    """

    base: int
    stride: int
    nbytes: int
    number: int
    seal: int | None = None
    first: int = 0

    @property
    def trailer(self) -> int:
        """Number of bytes after each chunk."""
        return CHECKSUM if self.seal is None else TRAILER

    @property
    def end(self) -> int:
        """Offset just after the last checksum or seal."""
        return self.base + (self.number - 1) * self.stride + self.nbytes + self.trailer


def make_spans(runs: Iterable[ChunkRun], seal_start: Callable[[ChunkRun], int | None]) -> list[ChunkSpan]:
    """Return the spans of boxes in a file. `seal_start` returns what the seals of a box start from, or None."""
    return [ChunkSpan(run.base, run.stride, run.nbytes, run.count, seal_start(run)) for run in runs]


def parse_spans(rows: Sequence[Sequence[int]]) -> list[ChunkSpan]:
    """Return spans from plain numbers, in file order. Raises ValueError if they overlap: no checksum would hold."""
    spans = sorted((ChunkSpan(*run) for run in rows if run[3]), key=lambda run: run.base)
    for run in spans:
        if run.base < 0 or run.nbytes < 1 or (run.number > 1 and run.stride < run.nbytes + run.trailer):
            raise ValueError(f"chunks that overlap themselves: {run}")
    for before, after in pairwise(spans):
        if after.base < before.end:
            raise ValueError(f"chunks that overlap: {before}, {after}")
    return spans
