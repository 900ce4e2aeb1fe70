"""Check of one rank's file: finds its bad and missing chunks, and merges them by chunk run for reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gangline.shard import Box
from gangline_ckpt_zarr.format.base import Meta
from gangline_ckpt_zarr.format.chunks import ChunkRun, RankFile
from gangline_ckpt_zarr.format.spans import make_spans
from gangline_ckpt_zarr.load import scan
from gangline_ckpt_zarr.load.scan import Window


@dataclass(frozen=True)
class BadChunks:
    """A bad chunk of a chunk run, and the reason. If `number` is None, all chunks of the run are bad."""

    run: ChunkRun
    number: int | None
    why: str

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        box: Box = self.run.box if self.number is None else self.run.chunk_box(self.number)
        return box.limits


class FileScanner:
    """Checker of the chunks in the first `there` bytes of a rank's file.

    `feed` must be called with every window of the file, in order.
    """

    def __init__(self, file: RankFile, meta: Meta, there: int) -> None:
        every = [run for run in file.runs if run.count]
        self._whole = {run: _count_complete(run, meta.trailer, there) for run in every}
        self._runs = [run for run in every if self._whole[run]]
        chunks = make_spans(self._runs, meta.compute_seal_start)
        runs = [c._replace(number=self._whole[r]) for r, c in zip(self._runs, chunks, strict=True)]
        self._scanner = scan.ChunkScanner(runs, lambda run, *chunk: meta.find_chunk_error(self._runs[run], *chunk))

    def feed(self, window: Window) -> Iterator[BadChunks]:
        """Yield the bad chunks that end in this window."""
        for run, number, why in self._scanner.feed(window):
            yield BadChunks(self._runs[run], number, why)

    def find_missing(self, why: str) -> Iterator[BadChunks]:
        """Yield the first missing chunk of each chunk run, or the run if all its chunks are missing.

        A run has one entry at most, because a damaged zarr.json may claim any number of chunks.
        """
        for run, whole in self._whole.items():
            if whole < run.count:
                yield BadChunks(run, whole or None if run.count > 1 else 0, why)


def _count_complete(run: ChunkRun, trailer: int, there: int) -> int:
    """Return the number of chunks of a chunk run that end within the first `there` bytes of the file."""
    return max(0, min(run.count, (there - run.base - run.nbytes - trailer) // run.stride + 1))


def merge_runs(found: list[BadChunks]) -> Iterator[BadChunks]:
    """Yield the bad chunks; if all chunks of a run are bad for one reason, yield one entry for the run."""
    first = 0
    while first < len(found):
        run, why = found[first].run, found[first].why
        stop = first
        while stop < len(found) and found[stop].run is run and found[stop].why == why:
            stop += 1
        if stop - first == run.count > 1:
            yield BadChunks(run, None, why)
        else:
            yield from found[first:stop]
        first = stop
