"""Writer of bytes of any length to a store, in blocks of complete pages from aligned memory."""

from __future__ import annotations

import mmap

from gangline_ckpt_zarr.stores.base import ObjectStore

BLOCK = 8 << 20


class Blocks:
    """Writer of a new object, from front to back. A context manager: the object is durable at exit, or aborted."""

    def __init__(self, store: ObjectStore, path: str, size: int) -> None:
        self._writer = store.create(path, size)
        self._buffer = memoryview(mmap.mmap(-1, max(1, min(BLOCK, size))))
        self._filled = 0
        self.offset = 0  # offset of the next byte in the object
        self._size = size

    def put(self, content: memoryview | bytes) -> None:
        """Append `content` to the object."""
        rest = memoryview(content)
        while rest:
            part = rest[: len(self._buffer) - self._filled]
            self._buffer[self._filled : self._filled + len(part)] = part
            self._add(len(part))
            rest = rest[len(part) :]

    def pad(self, offset: int) -> None:
        """Append zeros up to an offset."""
        while self.offset < offset:
            length = min(offset - self.offset, len(self._buffer) - self._filled)
            self._buffer[self._filled : self._filled + length] = bytes(length)
            self._add(length)

    def _add(self, length: int) -> None:
        self._filled += length
        self.offset += length
        if self._filled == len(self._buffer):
            self._flush()

    def _flush(self) -> None:
        if self._filled:
            self._writer.write(self._buffer[: self._filled])
            self._filled = 0

    def __enter__(self) -> Blocks:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        if kind is not None:
            self._writer.abort()
            return
        try:
            self.pad(self._size)
            self._flush()
            self._writer.close()
        except BaseException:
            self._writer.abort()
            raise
