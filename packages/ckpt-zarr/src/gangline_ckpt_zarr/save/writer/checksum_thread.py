"""Checksums of all chunks, computed by a thread just before their blocks are written."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

from gangline_ckpt_zarr.format.checksum import make_trailer
from gangline_ckpt_zarr.format.spans import ChunkSpan

_AT_ONCE = 8 << 20  # bytes of chunks between two updates of `_reached`


class ChecksumThread:
    """Thread that writes the checksums and seals into `memory`, in file order; `wait` waits for them.

    Raises ValueError if the chunks do not fit into the memory.
    """

    def __init__(self, memory: memoryview, runs: Sequence[ChunkSpan]) -> None:
        if runs and runs[-1].end > len(memory):
            raise ValueError(f"chunks end at byte {runs[-1].end}, the memory at byte {len(memory)}")
        self._memory, self._runs = memory, runs
        self._reached = 0  # every checksum that begins before this offset is written
        self._failed: BaseException | None = None
        self._news = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._work, name="checksums", daemon=True)
        self._thread.start()

    def wait(self, end: int) -> None:
        """Wait until all checksums that begin before `end` are in memory. Raises the thread's error."""
        with self._news:
            self._news.wait_for(lambda: self._reached >= end or self._failed is not None)
            if self._failed is not None:
                raise self._failed

    def stop(self) -> None:
        """Stop the thread after the part in progress. After return it does not touch the memory."""
        self._stopped = True
        self._thread.join()

    def _work(self) -> None:
        failure: BaseException | None = None
        try:
            for part in _split_runs(self._runs):
                if self._stopped:
                    return
                with self._news:
                    self._reached = part.base + part.nbytes
                    self._news.notify_all()
                fill_in(self._memory, part)
        except BaseException as error:
            failure = error
        with self._news:
            self._reached, self._failed = len(self._memory), failure
            self._news.notify_all()


def fill_in(memory: memoryview, run: ChunkSpan) -> None:
    """Write each chunk's checksum, and its seal if the span has seals, after the chunk."""
    for number in range(run.number):
        base = run.base + number * run.stride
        end = base + run.nbytes
        memory[end : end + run.trailer] = make_trailer(run.seal, run.first + number, memory[base:end])


def _split_runs(runs: Sequence[ChunkSpan]) -> Iterator[ChunkSpan]:
    """Split runs into parts of a few megabytes, or of one chunk."""
    for run in runs:
        step = max(1, _AT_ONCE // run.nbytes)
        for first in range(0, run.number, step):
            number = min(step, run.number - first)
            yield run._replace(base=run.base + first * run.stride, number=number, first=run.first + first)
