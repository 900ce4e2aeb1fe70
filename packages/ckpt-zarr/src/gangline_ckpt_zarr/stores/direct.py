"""Writer of one local file that bypasses the page cache (O_DIRECT), and makes the file and its name durable."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from gangline_ckpt_zarr.stores.base import ObjectWriter

PAGE = 4096
_DIRECT: int = getattr(os, "O_DIRECT", 0)
_NOT_HERE = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}


class DirectWriter(ObjectWriter):
    """Writer with O_DIRECT if the file system and the block allow it, else through the page cache.

    O_DIRECT is twice as fast on a disk, and leaves the page cache to processes that need it.
    """

    def __init__(self, place: Path, size: int, sync_names: Callable[[], None]) -> None:
        self._place, self._size, self._sync_names = place, size, sync_names
        self._offset = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._file = os.open(place, flags | _DIRECT, 0o666)
            self._direct = bool(_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # The file system does not support O_DIRECT: tmpfs, and some network file systems.
            self._file = os.open(place, flags, 0o666)
            self._direct = False
        try:
            _allocate(self._file, size, place)
        except BaseException:
            self.abort()
            raise

    def write(self, content: memoryview) -> None:
        content = content.cast("B") if content.nbytes else content
        if self._direct and (content.nbytes % PAGE or self._offset % PAGE):
            whole = content.nbytes // PAGE * PAGE if self._offset % PAGE == 0 else 0
            self._write(content[:whole])
            self._use_cache()
            content = content[whole:]
        self._write(content)

    def _write(self, content: memoryview) -> None:
        while content.nbytes:
            try:
                wrote = os.pwrite(self._file, content, self._offset)
            except OSError as error:
                if not (self._direct and error.errno == errno.EINVAL):
                    raise OSError(error.errno, error.strerror, str(self._place)) from error
                self._use_cache()  # the memory is not aligned as the file system requires
                continue
            self._offset += wrote
            content = content[wrote:]
            if self._direct and wrote % PAGE:
                self._use_cache()  # a short write: the next offset is not on a page boundary

    def _use_cache(self) -> None:
        flags = fcntl.fcntl(self._file, fcntl.F_GETFL)
        fcntl.fcntl(self._file, fcntl.F_SETFL, flags & ~_DIRECT)
        self._direct = False

    def close(self) -> None:
        """Finish the file; it and its name are durable on return. Raises OSError, or ValueError for a wrong size."""
        if self._offset != self._size:
            self.abort()
            raise ValueError(f"{self._place}: {self._offset} bytes were written instead of {self._size}")
        try:
            os.fsync(self._file)
        finally:
            os.close(self._file)
            self._file = -1
        self._sync_names()

    def abort(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
            with contextlib.suppress(OSError):
                self._place.unlink()


def _allocate(file: int, size: int, place: Path) -> None:
    """Allocate the file's blocks, so that a full disk is detected before anything is written. Raises OSError.

    ``os.posix_fallocate`` is not used: if the file system has no fallocate, it writes a byte to every block, perhaps
    over a network.
    """
    fallocate = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if not size or fallocate is None:
        return
    fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    while fallocate(file, 0, 0, size):
        number = ctypes.get_errno()
        if number in _NOT_HERE:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number), str(place))
