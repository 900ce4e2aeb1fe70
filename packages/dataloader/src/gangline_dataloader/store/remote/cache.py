"""A directory of fetched files that never holds more than so many bytes, for all processes of a machine.

A file's name holds its checksum, so what is there is right. The one that was used longest ago goes first; who has it
mapped keeps it until he lets go.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gangline import UserError
from gangline_dataloader.store.npy import checksum

ABANDONED = 3600.0  # seconds without a byte after which a file that is being fetched belongs to nobody
TRIES = 3  # times that a file is fetched whose bytes are not those that were written


class FileCache:
    """Files below `folder`, `limit` bytes of them."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, name: str, size: int, xxh3: str, fetch: Callable[[Path], None]) -> BinaryIO:
        """A file with that checksum, open to be read, fetched where it is not there.

        One process fetches it, the others wait. Whoever has it open keeps it when it makes room for another.
        Raises UserError where it does not fit, or arrives damaged again and again.
        """
        path = self.folder / f"{xxh3}-{Path(name).name}"
        if (file := _used(path)) is not None:
            return file
        if size > self.limit:
            raise UserError(
                f"data.cache_bytes={self.limit} is too small for {name}.", f"It has {size} bytes.", f"{size} or more"
            )
        with _locked(self.folder / f".{path.name}.lock"):
            if (file := _used(path)) is not None:
                return file
            waiting = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                for _ in range(TRIES):
                    with _locked(self.folder / ".lock"):
                        waiting.unlink(missing_ok=True)  # what arrived damaged is no file that others are fetching
                        self._make_room(size)
                        with waiting.open("wb") as empty:
                            os.ftruncate(empty.fileno(), size)  # so that others see what it will take
                    fetch(waiting)
                    if checksum(waiting) == xxh3:
                        with _locked(self.folder / ".lock"):
                            waiting.replace(path)
                            return path.open("rb")
            finally:
                waiting.unlink(missing_ok=True)
        raise UserError(
            f"{name} arrives damaged.", f"{TRIES} times its checksum was not {xxh3}.", "gangline data verify there"
        )

    def held(self) -> int:
        """Bytes of whole files."""
        return sum(size for _, size, _ in self._files())

    def _files(self) -> list[tuple[float, int, Path]]:
        found = []
        for path in self.folder.glob("[!.]*"):
            try:
                about = path.stat()
            except FileNotFoundError:  # another process made room
                continue
            found.append((about.st_mtime, about.st_size, path))
        return sorted(found)

    def _make_room(self, size: int) -> None:
        """Room for one more file, and for those that others are fetching."""
        files = self._files()
        held = sum(one for _, one, _ in files)
        for path in self.folder.glob(".*-*.npy.[0-9]*"):
            try:
                about = path.stat()
            except FileNotFoundError:  # it has become whole
                continue
            if time.time() - about.st_mtime > ABANDONED:
                path.unlink(missing_ok=True)
            else:
                held += about.st_size
        for _, one, path in files:
            if held + size <= self.limit:
                return
            path.unlink(missing_ok=True)
            held -= one


def _used(path: Path) -> BinaryIO | None:
    """The file, open and now the one that was used last; None where there is none."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    os.utime(file.fileno())
    return file


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class RemoteCache:
    """Where shards of distant stores lie, how many bytes of them, and how long anybody waits for one (seconds)."""

    folder: str
    nbytes: int
    deadline: float

    def files(self) -> FileCache:
        """The directory, made where it is not there."""
        return FileCache(Path(self.folder).expanduser(), self.nbytes)
