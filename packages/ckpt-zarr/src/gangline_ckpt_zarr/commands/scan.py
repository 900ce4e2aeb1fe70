"""A rank's file from front to back: read ahead by a thread, each cell checked as its bytes go by.

What lies between cells is padding, not data, and is not looked at.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastcrc.crc32 import iscsi as crc32c

from gangline.shard import Box
from gangline_ckpt_zarr.format.cells import File, Run
from gangline_ckpt_zarr.format.metadata import Meta
from gangline_ckpt_zarr.format.seal import wrong
from gangline_ckpt_zarr.stores.base import Store

LOCAL, REMOTE = 8 << 20, 64 << 20  # bytes read at once: what stays in the cache; enough for requests side by side


@dataclass(frozen=True)
class Bad:
    """A cell that is not what was written, and why; `number` None: all cells of the run."""

    run: Run
    number: int | None
    why: str

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        box: Box = self.run.box if self.number is None else self.run.cell_box(self.number)
        return tuple((start, start + length) for start, length in zip(box.offset, box.shape, strict=True))


@dataclass(frozen=True)
class Window:
    """Bytes of a file from `start` on, valid until the next is asked for; or why they cannot be had."""

    start: int
    size: int
    content: memoryview | None
    why: str = ""


def windows(store: Store, path: str, size: int) -> Iterator[Window]:
    """The first `size` bytes of a file; what cannot be read comes as a window without content."""
    length = LOCAL if store.local else REMOTE
    buffers = [memoryview(mmap.mmap(-1, min(length, size) or 1)) for _ in range(2)]  # on pages, so O_DIRECT takes them
    try:
        there = min(store.size(path), size)
    except FileNotFoundError:
        yield Window(0, size, None, "the file is missing")
        return

    def read(start: int) -> Window:
        stop = min(start + length, there)
        content = buffers[start // length % 2][: stop - start]
        try:
            store.read_into(path, [(start, [content])])
        except (OSError, EOFError) as error:
            return Window(start, stop - start, None, str(error))
        return Window(start, stop - start, content)

    with ThreadPoolExecutor(1, thread_name_prefix="read ahead") as ahead:
        starts = iter(range(0, there, length))
        pending = next((ahead.submit(read, start) for start in starts), None)
        while pending is not None:
            window = pending.result()
            pending = next((ahead.submit(read, start) for start in starts), None)
            yield window
    if there < size:
        yield Window(there, size - there, None, f"the file ends at {there}, and should have {size} bytes")


class Check:
    """Checks the cells of a file of a checkpoint; windows come in order."""

    def __init__(self, file: File, meta: Meta) -> None:
        self._meta, self._trailer = meta, meta.trailer
        self._runs = [run for run in file.runs if run.count]
        self._run = self._number = 0  # the cell that comes next, or is half seen
        self._crc, self._kept, self._why = 0, b"", ""  # of that cell

    def feed(self, window: Window) -> Iterator[Bad]:
        """The bad cells that end in this window."""
        start, stop, content = window.start, window.start + window.size, window.content
        while self._run < len(self._runs):
            run = self._runs[self._run]
            nbytes, stride, base = run.nbytes, run.stride, run.base
            seals = self._meta.seal_start(run)
            while self._number < run.count:
                begin = base + self._number * stride
                if begin >= stop:
                    return
                end = begin + nbytes
                if begin >= start and end + self._trailer <= stop and content is not None:
                    at = end - start
                    checksum = crc32c(content[begin - start : at])
                    if why := wrong(seals, self._number, checksum, content[at : at + self._trailer]):
                        yield Bad(run, self._number, why)
                else:
                    self._part(window, begin, end)
                    if end + self._trailer > stop:
                        return
                    if why := self._why or wrong(seals, self._number, self._crc, self._kept):
                        yield Bad(run, self._number, why)
                    self._crc, self._kept, self._why = 0, b"", ""
                self._number += 1
            self._run, self._number = self._run + 1, 0

    def _part(self, window: Window, begin: int, end: int) -> None:
        """What a window has of a cell that is not wholly in it."""
        if window.content is None:
            self._why = self._why or window.why
            return
        start, stop = window.start, window.start + window.size
        self._crc = crc32c(window.content[max(begin, start) - start : max(0, min(end, stop) - start)], self._crc)
        if stop > end:
            self._kept += bytes(window.content[max(end, start) - start : min(end + self._trailer, stop) - start])


def merged(found: list[Bad]) -> Iterator[Bad]:
    """The same, with one for a run of which every cell is bad in the same way."""
    first = 0
    while first < len(found):
        run, why = found[first].run, found[first].why
        stop = first
        while stop < len(found) and found[stop].run is run and found[stop].why == why:
            stop += 1
        if stop - first == run.count > 1:
            yield Bad(run, None, why)
        else:
            yield from found[first:stop]
        first = stop
