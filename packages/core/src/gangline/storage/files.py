"""Functions to open, lock and replace files without following links, blocking on pipes or writing partial content.

Torch-free.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from gangline.errors import UserError

DOCUMENT_BYTES = 1 << 28  # maximum size of a file that holds one document, such as config.yaml
LINES_BYTES = 1 << 30  # maximum size of a file that grows while the run lives, such as events.jsonl
STREAM_BYTES = 1 << 33  # maximum size of a file that is read line by line, such as metrics.jsonl
LOOK_SECONDS = 0.01  # seconds between two attempts to take a lock
_LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW  # NFS grants an exclusive lock only on a file open for writing
# errno of fsync on a directory if the file system cannot sync directories.
_NO_SYNC = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV, errno.EBADF}
_KINDS = {
    stat.S_IFIFO: "named pipe",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device",
    stat.S_IFBLK: "device",
    stat.S_IFDIR: "folder",
}


def open_own(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file of a run directory for writing.

    Raises OSError if `path` is a symbolic link, and UserError for a pipe or device, as `open_handle` does.
    """
    encoding = None if "b" in mode else "utf-8"
    return open(path, mode, buffering, encoding, opener=lambda name, flags: open_handle(name, flags | os.O_NOFOLLOW))


def open_regular(path: str | Path, limit: int = STREAM_BYTES) -> BinaryIO:
    """Open a file of a run directory for reading, in binary.

    Raises UserError for a pipe, a device, and a file of more than `limit` bytes; OSError if it cannot be opened.
    """
    return cast(
        BinaryIO, open(path, "rb", opener=lambda name, flags: _check_size(limit, name, open_handle(name, flags)))
    )


def read_regular(path: str | Path, limit: int = DOCUMENT_BYTES) -> bytes:
    """Return the content of a file of a run directory; raises the errors of `open_regular`."""
    with open_regular(path, limit) as file:
        return file.read()


def open_handle(path: str | Path, flags: int, mode: int = 0o666) -> int:
    """Return the handle of a regular file, opened with these flags of `os.open`.

    Raises UserError at once for any other kind, such as a named pipe, whose opening or reading would block for ever.
    Raises OSError if the file cannot be opened.
    """
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a pipe without a reader, opened for writing, or a socket
            raise make_special_file_error(path, os.stat(path).st_mode) from None
        raise
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise make_special_file_error(path, kind)
    os.set_blocking(handle, True)
    return handle


def open_lock(path: str | Path, mode: int = 0o644) -> int:
    """Return the handle of a file to lock, created if it is missing.

    Raises OSError if `path` is a symbolic link, and the errors of `open_handle`.
    """
    return open_handle(path, _LOCK_FLAGS, mode)


def lock_handle(handle: int, *, shared: bool = False, seconds: float | None = None) -> None:
    """Lock an open file or folder until all copies of the handle are closed, at the latest when their processes end.

    shared   True: a shared lock, False: an exclusive lock; converts a lock that the handle already holds
    seconds  timeout of the wait for other holders; None: no timeout

    Raises BlockingIOError if another process still holds the lock; another OSError if the file system has no locks.
    """
    how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    if seconds is None:
        fcntl.flock(handle, how)
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, how | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise
            time.sleep(LOOK_SECONDS)


@contextmanager
def lock_file(
    path: str | Path, *, seconds: float | None = None, required: bool = True, mode: int = 0o644
) -> Iterator[None]:
    """Hold the exclusive lock of a file, created if it is missing.

    seconds   timeout of the wait for other holders; None: no timeout
    required  False: continue without the lock on a file system that has no locks

    Raises the errors of `open_lock` and `lock_handle`.
    """
    with _hold_lock(open_lock(path, mode), seconds, required):
        yield


@contextmanager
def lock_folder(path: str | Path, *, seconds: float | None = None, required: bool = True) -> Iterator[None]:
    """Hold the exclusive lock of a folder, as `lock_file` does. Raises OSError if `path` is a symbolic link."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with _hold_lock(handle, seconds, required):
        yield


@contextmanager
def _hold_lock(handle: int, seconds: float | None, required: bool) -> Iterator[None]:
    """Hold the lock of a handle in the block, then close the handle."""
    try:
        try:
            lock_handle(handle, seconds=seconds)
        except OSError as error:
            if required or isinstance(error, BlockingIOError):
                raise
        yield
    finally:
        os.close(handle)


@contextmanager
def open_replacement(
    path: Path, *, mode: int = 0o666, durable: bool = True, replace: bool = True, temporary: str = ""
) -> Iterator[BinaryIO]:
    """Open a new file next to `path` that is renamed to `path` when the context ends, and deleted on an error.

    A reader sees the complete old or the complete new content. A symbolic link at `path` is replaced, not followed.

    mode       permissions of the new file, restricted by the umask
    durable    wait until the content and then the name are on the disk (fsync)
    replace    False: raise FileExistsError if `path` exists
    temporary  name of the file before the rename; an existing file of this name is deleted. "": a unique name
    """
    # A random name, not a pid: nodes share the folder, and containers may have equal pids and host names.
    new = path.with_name(temporary or f".{path.name}.{secrets.token_hex(6)}")
    if temporary:
        new.unlink(missing_ok=True)
    try:
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        with open(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        if replace:
            os.replace(new, path)
        else:
            _link(new, path)
            new.unlink()
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink()
        raise
    if durable:
        sync_folder(path.parent)


def write_whole(
    path: Path,
    content: str | bytes,
    *,
    mode: int = 0o666,
    durable: bool = True,
    replace: bool = True,
    temporary: str = "",
) -> None:
    """Replace a file atomically by a new file with this content; options as in `open_replacement`."""
    with open_replacement(path, mode=mode, durable=durable, replace=replace, temporary=temporary) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def sync_folder(folder: str | Path) -> None:
    """Make the names in a folder durable, if its file system supports that. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise
    finally:
        os.close(handle)


def _link(new: Path, path: Path) -> None:
    """Link `new` as `path` (hard link). Raises FileExistsError: unlike a rename, a link never replaces a file."""
    try:
        os.link(new, path)
    except FileExistsError as error:
        if new.stat().st_nlink != 2:  # NFS may repeat a request and then find its own link
            raise FileExistsError(error.errno, error.strerror, str(path)) from None


def _check_size(limit: int, path: str, handle: int) -> int:
    if (size := os.fstat(handle).st_size) > limit:
        os.close(handle)
        raise UserError(
            f"{path} has {size:,} bytes; a run writes at most {limit:,} bytes to this file.",
            "Reading the file could exhaust the memory of this machine.",
            f"Find out what wrote the file, and move it away:  mv {shlex.quote(path)} ELSEWHERE",
        )
    return handle


def make_special_file_error(path: str | Path, kind: int) -> UserError:
    """Return the error for a file of this kind (`st_mode`) at a path where a regular file is expected."""
    why = "Reading this file would block until another program writes to it."
    if stat.S_ISDIR(kind):
        why = "A run needs a regular file at this path."
    return UserError(
        f"{path} is a {_KINDS.get(stat.S_IFMT(kind), 'special file')}, not a regular file.",
        why,
        f"Find out what created this path, and move it away:  mv {shlex.quote(str(path))} ELSEWHERE",
    )
