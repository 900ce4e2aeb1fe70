"""Offsets and sizes of a file's chunks, for code that checks and writes chunks without knowing arrays. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from gangline_ckpt_zarr.format.checksum import CHECKSUM, TRAILER

if TYPE_CHECKING:
    from gangline_ckpt_zarr.format.chunks import ChunkRun


class ChunkSpan(NamedTuple):
    """`number` chunks of a file: chunk k at offset `base` + k * `stride` has `nbytes` bytes, then its crc32c (4 bytes).

    If `seal` is not None, a seal (4 bytes) follows the crc32c: `seal` is the start value of the seals, and `first` is
    the number of the span's first chunk in its box; see `format.checksum`.
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
    """Return a span for each run. `seal_start` returns the start value of the run's seals; None: no seals."""
    return [ChunkSpan(run.base, run.stride, run.nbytes, run.count, seal_start(run)) for run in runs]


def parse_spans(rows: Sequence[Sequence[int]]) -> list[ChunkSpan]:
    """Return spans from plain numbers, in file order. Raises ValueError if chunks overlap: no checksum would match."""
    spans = sorted((ChunkSpan(*run) for run in rows if run[3]), key=lambda run: run.base)
    for run in spans:
        if run.base < 0 or run.nbytes < 1 or (run.number > 1 and run.stride < run.nbytes + run.trailer):
            raise ValueError(f"chunks that overlap or have an invalid size: {run}")
    for before, after in pairwise(spans):
        if after.base < before.end:
            raise ValueError(f"chunks that overlap: {before}, {after}")
    return spans
