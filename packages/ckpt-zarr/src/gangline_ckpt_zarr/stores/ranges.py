"""Plan of requests for byte ranges: neighbouring ranges are merged, long ranges are split."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

GAP = 256 << 10  # maximum bytes between merged ranges: fetching them is cheaper than a request (some 20 ms at 60 MB/s)
LONGEST = 16 << 20  # maximum bytes of one request


@dataclass
class Fetch:
    """Request for bytes `start` to `stop` of an object, and the buffers to fill with parts of these bytes."""

    start: int
    stop: int
    parts: list[tuple[int, memoryview]] = field(default_factory=list)  # (offset in the object, buffer)

    def fill(self, got: bytes) -> None:
        view = memoryview(got)
        for offset, buffer in self.parts:
            first = offset - self.start
            buffer[:] = view[first : first + len(buffer)]


def plan_fetches(ranges: Sequence[tuple[int, Sequence[memoryview]]]) -> list[Fetch]:
    """Return requests that cover every range, each byte at most once unless the ranges themselves overlap."""
    fetches: list[Fetch] = []
    for offset, buffer in sorted(_split_ranges(ranges), key=lambda piece: piece[0]):
        last, stop = fetches[-1] if fetches else None, offset + len(buffer)
        if last is None or offset - last.stop > GAP or max(stop, last.stop) - last.start > LONGEST:
            last = Fetch(offset, stop)
            fetches.append(last)
        last.stop = max(last.stop, stop)
        last.parts.append((offset, buffer))
    return fetches


def _split_ranges(ranges: Sequence[tuple[int, Sequence[memoryview]]]) -> Iterator[tuple[int, memoryview]]:
    for offset, buffers in ranges:
        for buffer in buffers:
            if buffer.nbytes:
                flat = buffer.cast("B")
                for first in range(0, len(flat), LONGEST):
                    piece = flat[first : first + LONGEST]
                    yield offset + first, piece
                offset += len(flat)
