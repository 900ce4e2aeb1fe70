"""Shard cache: a directory of fetched files with a size limit, shared by all processes of a machine.

A file's name holds its checksum. The least recently used file is evicted first; a process that has an evicted file
mapped can read it until it closes the map.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gangline import UserError
from gangline.storage.files import lock_file, sync_folder
from gangline_dataloader.store.durable import replace_bytes
from gangline_dataloader.store.npy import compute_checksum, compute_stream_checksum

ABANDONED = 3600.0  # seconds without a byte after which a partly fetched file is removed
TRIES = 3  # maximum attempts to fetch a file that arrives with a wrong checksum
FOLDER = "gangline-shards"  # folder below data.cache: every file in it belongs to the cache
MARKER = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backups skip a directory that has one
SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n# Shards of token stores, fetched by gangline.\n"
_NAME = re.compile(r"[0-9a-f]{32}-shard-\d{5,}[\w.-]*\.npy")  # only files with such a name are ever removed
_FETCHED = re.compile(rf"\.{_NAME.pattern}\.\d+")

log = logging.getLogger(__name__)
_checked: set[tuple[int, int, int, int]] = set()  # verified files: device, inode, size, modification time


class FileCache:
    """Cache of files in `FOLDER` below `place`, at most `limit` bytes; the folder is created if it is missing.

    Raises UserError if `FOLDER` holds files but no `MARKER` of gangline, because the folder is then not a cache.
    """

    def __init__(self, place: Path, limit: int) -> None:
        self.folder, self.limit = place / FOLDER, limit
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_marked(self.folder):
            if any(self.folder.glob("[!.]*")) and not _is_marked(self.folder):  # another process may have marked it now
                raise UserError(
                    f"data.cache={place}: {self.folder} is not a cache that gangline created.",
                    f"The folder has files, but no {MARKER}. A cache deletes old files, so it needs a separate folder.",
                    "Choose another data.cache, or move the folder elsewhere.",
                )
            replace_bytes(self.folder / MARKER, SIGNATURE, f".{os.getpid()}")

    def open(self, name: str, size: int, xxh3: str, fetch: Callable[[Path], None]) -> BinaryIO:
        """Open the file `name` with checksum `xxh3` for reading; if it is missing, `fetch(path)` fetches it.

        One process fetches a file, other processes wait. An open file stays readable when the cache removes it.
        Raises UserError if the file exceeds the cache limit, or arrives damaged `TRIES` times.
        """
        path = self.folder / f"{xxh3}-{Path(name).name}"
        assert _NAME.fullmatch(path.name), f"{path.name} is not a name that the cache may remove"
        if (file := _open_used(path, xxh3)) is not None:
            return file
        if size > self.limit:
            raise UserError(
                f"data.cache_bytes={self.limit} is too small for {name}.",
                f"The file has {size} bytes.",
                f"data.cache_bytes={size}, or more",
            )
        with lock_file(self.folder / f".{path.name}.lock", mode=0o666):
            if (file := _open_used(path, xxh3)) is not None:
                return file
            waiting = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                for _ in range(TRIES):
                    with lock_file(self.folder / ".lock", mode=0o666):
                        waiting.unlink(missing_ok=True)  # a damaged file must not count as one being fetched
                        self._make_room(size)
                        with waiting.open("wb") as empty:
                            os.ftruncate(empty.fileno(), size)  # reserves the size, which other processes count
                    fetch(waiting)
                    if compute_checksum(waiting) == xxh3:
                        _sync(waiting)
                        with lock_file(self.folder / ".lock", mode=0o666):
                            waiting.replace(path)
                            file = path.open("rb")
                            sync_folder(self.folder)
                            _checked.add(_get_version(file))
                            return file
            finally:
                waiting.unlink(missing_ok=True)
        raise UserError(
            f"{name} was damaged in each of {TRIES} downloads.",
            f"The checksum in the manifest is {xxh3}.",
            "To check the store at its URL:  gangline data verify URL",
        )

    def count_bytes(self) -> int:
        """Count the bytes of the complete files in the cache."""
        return sum(about.st_size for about, _ in self._list_files(_NAME))

    def _list_files(self, name: re.Pattern[str]) -> list[tuple[os.stat_result, Path]]:
        """List the cache's files with names that match `name`, least recently used first."""
        files = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if not name.fullmatch(entry.name):
                    continue
                try:
                    if entry.is_file(follow_symlinks=False):
                        files.append((entry.stat(follow_symlinks=False), Path(entry.path)))
                except FileNotFoundError:  # another process made room
                    continue
        return sorted(files, key=lambda one: (one[0].st_atime, one[1]))

    def _make_room(self, size: int) -> None:
        """Make room for `size` bytes by eviction; files that other processes are fetching count as used space."""
        files = self._list_files(_NAME)
        total_bytes = sum(about.st_size for about, _ in files)
        for about, path in self._list_files(_FETCHED):
            if time.time() - about.st_mtime > ABANDONED:
                path.unlink(missing_ok=True)
            else:
                total_bytes += about.st_size
        for about, path in files:
            if total_bytes + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            total_bytes -= about.st_size


def _is_marked(folder: Path) -> bool:
    try:
        return (folder / MARKER).read_bytes() == SIGNATURE
    except FileNotFoundError:
        return False


def _open_used(path: Path, xxh3: str) -> BinaryIO | None:
    """Open a cached file and mark it as used now; None if it is missing or damaged.

    Each process verifies the checksum of a file once, because the disk may have changed the file since its fetch.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    if (version := _get_version(file)) not in _checked:
        if compute_stream_checksum(file) != xxh3:  # reads the open file, as another process may remove the name
            log.warning("%s in the shard cache is damaged: removing the file and fetching it again", path)
            file.close()
            path.unlink(missing_ok=True)
            return None
        _checked.add(version)
    os.utime(file.fileno(), ns=(time.time_ns(), os.fstat(file.fileno()).st_mtime_ns))
    return file


def _get_version(file: BinaryIO) -> tuple[int, int, int, int]:
    about = os.fstat(file.fileno())
    return about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@dataclass(frozen=True)
class RemoteCache:
    """Options of the shard cache: directory, maximum size in bytes, and timeout in seconds to fetch a file."""

    folder: str
    nbytes: int
    deadline: float

    def open_file_cache(self) -> FileCache:
        """Open the cache; its directory is created if it is missing. Raises UserError like `FileCache`."""
        return FileCache(Path(self.folder).expanduser(), self.nbytes)
