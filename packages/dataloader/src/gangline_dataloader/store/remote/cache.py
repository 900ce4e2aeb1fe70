"""A directory of fetched files that never holds more than so many bytes, for all processes of a machine.

A file's name holds its checksum. The file that was used longest ago is removed first; a process that has it mapped
keeps its bytes until it closes the map.
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

ABANDONED = 3600.0  # seconds without a byte after which a file that is being fetched belongs to nobody
TRIES = 3  # times that a file is fetched whose bytes are not those that were written
FOLDER = "gangline-shards"  # below the directory that the user names: every file in it is the cache's own
MARKER = "CACHEDIR.TAG"  # https://bford.info/cachedir/: backups skip a directory that has one
SIGNATURE = b"Signature: 8a477f597d28d172789f06886806bc55\n# Shards of token stores, fetched by gangline.\n"
_NAME = re.compile(r"[0-9a-f]{32}-shard-\d{5,}[\w.-]*\.npy")  # only files of such a name are ever removed
_FETCHED = re.compile(rf"\.{_NAME.pattern}\.\d+")

log = logging.getLogger(__name__)
_checked: set[tuple[int, int, int, int]] = set()  # device, inode, size, modified: compared with their checksum already


class FileCache:
    """Files in `FOLDER` below `place`, `limit` bytes of them; the folder is created where it is missing.

    Raises UserError where `FOLDER` holds files and no `MARKER` of gangline: it belongs to somebody else.
    """

    def __init__(self, place: Path, limit: int) -> None:
        self.folder, self.limit = place / FOLDER, limit
        self.folder.mkdir(parents=True, exist_ok=True)
        if not _is_marked(self.folder):
            if any(self.folder.glob("[!.]*")) and not _is_marked(self.folder):  # another process may have marked it now
                raise UserError(
                    f"data.cache={place}: {self.folder} is not a cache that gangline created.",
                    f"It holds files and no {MARKER}. A cache removes old files, so it needs a folder of its own.",
                    "Choose another data.cache, or move that folder away.",
                )
            replace_bytes(self.folder / MARKER, SIGNATURE, f".{os.getpid()}")

    def open(self, name: str, size: int, xxh3: str, fetch: Callable[[Path], None]) -> BinaryIO:
        """A file with that checksum, open to be read, fetched where it is missing.

        One process fetches it, the others wait. A process that has it open keeps it when the cache removes it.
        Raises UserError where it does not fit, or arrives damaged again and again.
        """
        path = self.folder / f"{xxh3}-{Path(name).name}"
        assert _NAME.fullmatch(path.name), f"{path.name} is not a name that the cache may remove"
        if (file := _open_used(path, xxh3)) is not None:
            return file
        if size > self.limit:
            raise UserError(
                f"data.cache_bytes={self.limit} is too small for {name}.", f"It has {size} bytes.", f"{size} or more"
            )
        with lock_file(self.folder / f".{path.name}.lock", mode=0o666):
            if (file := _open_used(path, xxh3)) is not None:
                return file
            waiting = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                for _ in range(TRIES):
                    with lock_file(self.folder / ".lock", mode=0o666):
                        waiting.unlink(missing_ok=True)  # what arrived damaged is no file that others are fetching
                        self._make_room(size)
                        with waiting.open("wb") as empty:
                            os.ftruncate(empty.fileno(), size)  # so that others see what it will take
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
            f"{name} arrives damaged.", f"{TRIES} times its checksum was not {xxh3}.", "gangline data verify there"
        )

    def count_bytes(self) -> int:
        """Bytes of complete files."""
        return sum(about.st_size for about, _ in self._list_files(_NAME))

    def _list_files(self, name: re.Pattern[str]) -> list[tuple[os.stat_result, Path]]:
        """The cache's own files of such a name, the one that was used longest ago first."""
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
        """Room for one more file, and for the files that other processes are fetching."""
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
    """The file, open and now the one that was used last; None where it is missing or damaged.

    Each process compares it with its checksum once: a disk may have changed it since it was fetched.
    """
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    if (version := _get_version(file)) not in _checked:
        if compute_stream_checksum(file) != xxh3:  # of what is open: another process may remove the name
            log.warning("%s is damaged: it is removed and fetched again", path)
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
    """Directory for the shards of stores behind URLs, its limit in bytes, and the seconds that a read waits for one."""

    folder: str
    nbytes: int
    deadline: float

    def open_file_cache(self) -> FileCache:
        """The directory, created where it is missing."""
        return FileCache(Path(self.folder).expanduser(), self.nbytes)
