"""Object store in a directory of a local or mounted file system. Closed and committed objects are on the disk."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from gangline.storage.files import lock_folder, sync_folder, write_whole
from gangline_ckpt_zarr.stores.base import METADATA, ObjectStore, ObjectWriter, Ranges, Read
from gangline_ckpt_zarr.stores.direct import DirectWriter

_UNFINISHED = ".unfinished-"  # prefix of the temporary files of a commit
_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_LATE_FILES = 100  # maximum attempts to delete a tree, 10 ms apart, while another process still writes to it


class LocalStore(ObjectStore):
    local = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self._root = Path(root).absolute()
        self.url = str(self._root)
        self._made: set[Path] = set()  # directories that this store has created

    def create(self, path: str, size: int) -> ObjectWriter:
        place = self._root / path
        self._make_directories(place.parent)
        return DirectWriter(place, size, lambda: self._sync_directories(place.parent))

    def commit(self, path: str, content: bytes) -> None:
        """Write the object by a hard link, which never replaces a file. Raises FileExistsError, OSError."""
        place = self._root / path
        self._make_directories(place.parent)
        temporary = f"{_UNFINISHED}{place.name}-{secrets.token_hex(8)}"
        write_whole(place, content, replace=False, temporary=temporary)
        if place.parent != self._root:
            self._sync_directories(place.parent.parent)

    def read(self, path: str) -> bytes:
        with open(self._open(path), "rb") as file:
            return file.read()

    def read_into(self, path: str, ranges: Ranges) -> None:
        with self.open_reader(path) as read:
            read(ranges)

    @contextlib.contextmanager
    def open_reader(self, path: str) -> Iterator[Read]:
        file = self._open(path)

        def read(ranges: Ranges) -> None:
            for offset, buffers in ranges:
                _fill(file, offset, buffers, path)

        try:
            yield read
        finally:
            os.close(file)

    def _open(self, path: str) -> int:
        """Return a descriptor for reading. Raises OSError at once for a pipe or a device, which would block."""
        file = os.open(self._root / path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise OSError(errno.EINVAL, "not a regular file", str(self._root / path))
        os.set_blocking(file, True)
        return file

    def size(self, path: str) -> int:
        return (self._root / path).stat().st_size

    def exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def names(self, path: str = "") -> list[str]:
        try:
            names = os.listdir(self._root / path)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(name for name in names if not name.startswith(_UNFINISHED))

    def walk(self, path: str = "") -> list[str]:
        return sorted(
            os.path.relpath(os.path.join(directory, name), self._root)
            for directory, _, names in os.walk(self._root / path)
            for name in names
            if not name.startswith(_UNFINISHED)
        )

    def list_sizes(self, path: str = "") -> dict[str, int]:
        sizes, place = {}, self._root / path
        for name in self.walk(path):
            with contextlib.suppress(FileNotFoundError):  # the object was deleted meanwhile
                sizes[os.path.relpath(self._root / name, place)] = (self._root / name).stat().st_size
        return sizes

    def delete(self, path: str) -> None:
        place = self._root / path
        if not place.is_dir() or place.is_symlink():
            place.unlink(missing_ok=True)
        else:
            for directory, _, names in os.walk(place):  # outermost first
                if METADATA in names:
                    os.unlink(os.path.join(directory, METADATA))
                    sync_folder(directory)
            _remove_tree(place)
        self._remove_empty_directories(place.parent)

    def lock(self) -> AbstractContextManager[None]:
        self._make_directories(self._root)
        return lock_folder(self._root.resolve(), seconds=0)

    def _remove_empty_directories(self, directory: Path) -> None:
        """Remove `directory` and its parents while they are empty: the root and above only if this store made them."""
        while self._root in directory.parents or directory in self._made:
            try:
                directory.rmdir()
            except FileNotFoundError:
                pass  # another rank was faster
            except OSError:
                break  # not empty
            directory = directory.parent
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            sync_folder(directory)

    def _make_directories(self, directory: Path) -> None:
        """Create a directory and its parents. Only the root is durable on return: see `_sync_directories`."""
        missing = [place for place in (directory, *directory.parents) if not place.exists()]
        for place in reversed(missing):
            with contextlib.suppress(FileExistsError):  # another rank was faster
                place.mkdir()
                self._made.add(place)
            if place == self._root or place in self._root.parents:
                sync_folder(place.parent)

    def _sync_directories(self, directory: Path) -> None:
        """Sync `directory` and its parents up to the root: another rank may have created but not yet synced them."""
        while True:
            sync_folder(directory)
            if directory == self._root or directory == directory.parent:
                return
            directory = directory.parent


def _fill(file: int, offset: int, buffers: Sequence[memoryview], path: str) -> None:
    """Read from `offset` into the buffers, as many buffers per call as the system allows. Raises EOFError."""
    views = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    position = 0  # index of the first buffer that is not yet full
    while position < len(views):
        got = os.preadv(file, views[position : position + _IOV_MAX], offset)
        if not got:
            shortfall = sum(map(len, views[position:]))
            raise EOFError(f"{path} ends at byte {offset}, {shortfall} bytes too early")
        offset += got
        while position < len(views) and got >= len(views[position]):
            got -= len(views[position])
            position += 1
        if got:
            views[position] = views[position][got:]


def _remove_tree(place: Path) -> None:
    """Remove a tree, and files that are written meanwhile: another process may be writing to it or removing it."""
    for _ in range(_LATE_FILES):
        for directory, directories, names in os.walk(place, topdown=False):
            for name in names:
                Path(directory, name).unlink(missing_ok=True)
            for name in directories:
                _remove_directory(Path(directory, name))
        if _remove_directory(place):
            return
        time.sleep(0.01)
    place.rmdir()  # raises the OSError with the reason


def _remove_directory(place: Path) -> bool:
    """Remove an empty directory or a symbolic link. Return False if another process has just written to it."""
    with contextlib.suppress(FileNotFoundError):
        if place.is_symlink():
            place.unlink()
        else:
            try:
                place.rmdir()
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return False
                raise
    return True
