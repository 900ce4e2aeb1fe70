"""Scan of a file of chunks from front to back: prefetched by a thread, each chunk checked as it is read. Torch-free.

Bytes between chunks are padding, not data, and are not checked.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple

from gangline_ckpt_zarr.format.checksum import checksum_of, find_trailer_error
from gangline_ckpt_zarr.format.spans import ChunkSpan
from gangline_ckpt_zarr.stores.base import ObjectStore

Judge = Callable[[int, int, int, "bytes | memoryview"], str]
LOCAL, REMOTE = 8 << 20, 64 << 20  # bytes per read: fits in the CPU cache; enough for parallel requests


class BadChunk(NamedTuple):
    """A chunk that differs from what was written: the number of its chunk run, its number in the run, and why."""

    run: int
    number: int
    why: str


@dataclass(frozen=True)
class Window:
    """`size` bytes of a file from offset `start` on. `content` is valid until the next window is requested.

    If the bytes cannot be read, `content` is None and `why` is the reason.
    """

    start: int
    size: int
    content: memoryview | None
    why: str = ""


def read_windows(store: ObjectStore, path: str, size: int) -> Iterator[Window]:
    """Yield the first `size` bytes of a file; bytes that cannot be read come as a window without content."""
    length = LOCAL if store.local else REMOTE
    buffers = [memoryview(mmap.mmap(-1, min(length, size) or 1)) for _ in range(2)]  # page-aligned, for O_DIRECT
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
        yield Window(there, size - there, None, f"the file has {there} bytes instead of {size}")


class ChunkScanner:
    """Checker of the chunks of a file. `feed` must be called with every window of the file, in order.

    `judge`: (number of the chunk run, number of the chunk in the run, checksum of the chunk, trailer of the chunk) ->
    why the chunk is bad, "" if it is good; None: check the checksum and seal in the trailer.
    """

    def __init__(self, runs: Sequence[ChunkSpan], judge: Judge | None = None) -> None:
        self._runs, self._judge = runs, judge or self._check_seal
        self._run = self._number = 0  # run and number of the next chunk, or of a partly read chunk
        self._crc, self._kept, self._why = 0, b"", ""  # checksum, trailer and error of the partly read chunk

    def feed(self, window: Window) -> Iterator[BadChunk]:
        """Yield the bad chunks that end in this window."""
        start, stop, content = window.start, window.start + window.size, window.content
        while self._run < len(self._runs):
            base, stride, nbytes, count, *_ = run = self._runs[self._run]
            trailer = run.trailer
            while self._number < count:
                begin = base + self._number * stride
                if begin >= stop:
                    return
                end, why = begin + nbytes, ""
                if begin >= start and end + trailer <= stop and content is not None:
                    at = end - start
                    checksum = checksum_of(content[begin - start : at])
                    why = self._judge(self._run, self._number, checksum, content[at : at + trailer])
                else:
                    self._feed_part(window, begin, end, trailer)
                    if end + trailer > stop:
                        return
                    why = self._why or self._judge(self._run, self._number, self._crc, self._kept)
                    self._crc, self._kept, self._why = 0, b"", ""
                if why:
                    yield BadChunk(self._run, self._number, why)
                self._number += 1
            self._run, self._number = self._run + 1, 0

    def find_unread(self, window: Window) -> BadChunk:
        """Return the first chunk that a window without content leaves unchecked, as bad. Call it after `feed`."""
        return BadChunk(min(self._run, len(self._runs) - 1), self._number, window.why)

    def _check_seal(self, run: int, number: int, checksum: int, trailer: bytes | memoryview) -> str:
        return find_trailer_error(self._runs[run].seal, self._runs[run].first + number, checksum, trailer)

    def _feed_part(self, window: Window, begin: int, end: int, trailer: int) -> None:
        """Add this window's bytes of a chunk that is only partly in the window."""
        if window.content is None:
            self._why = self._why or window.why
            return
        start, stop = window.start, window.start + window.size
        self._crc = checksum_of(window.content[max(begin, start) - start : max(0, min(end, stop) - start)], self._crc)
        if stop > end:
            self._kept += bytes(window.content[max(end, start) - start : min(end + trailer, stop) - start])
