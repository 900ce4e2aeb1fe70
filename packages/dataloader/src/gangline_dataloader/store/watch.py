"""Files that a run has mapped: whether they are still what they were when it began."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from gangline import UserError
from gangline_dataloader.store.npy import checksum, verify

EVERY = 60.0  # seconds between two looks, at most: a look is a call to the file system for each file
OFTEN = 1.0  # and at least
COST = 0.01  # of the time, between them, is what looks may take


class WatchedFiles:
    """Size and time of files, looked at again once a second, or once a minute where looks take long; one with others is
    held against its checksum.

    A file that somebody cuts short between a look and a read ends the process with SIGBUS, as it does for whoever maps
    files: the next start names it.
    """

    def __init__(self) -> None:
        self._began, self._next = time.time(), time.monotonic() + OFTEN
        self._files: dict[Path, tuple[int, int, str | None]] = {}
        self._changed: UserError | None = None

    def add(self, path: Path, xxh3: str | None) -> None:
        """A file that was opened; one that was written since the run began is held against its checksum at once.

        xxh3  None: nobody knows it, and any change is one too many
        Raises UserError where its bytes are others.
        """
        about = path.stat()
        if xxh3 is not None and about.st_mtime > self._began:
            _compare(path, xxh3)
        self._files[path] = (about.st_size, about.st_mtime_ns, xxh3)

    def look(self) -> None:
        """Look again, if it is time to. Raises UserError where a file has changed, and from then on always."""
        if self._changed is not None:
            raise self._changed
        if (now := time.monotonic()) < self._next:
            return
        try:
            for path in list(self._files):
                self._look_at(path)
        except UserError as error:
            self._changed = error
            raise
        done = time.monotonic()
        self._next = done + min(EVERY, max(OFTEN, (done - now) / COST))

    def look_at(self, path: Path) -> None:
        """Look at one file now: for a file that is opened again for each read. Raises UserError as `look`."""
        try:
            self._look_at(path)
        except UserError as error:
            self._changed = error
            raise

    def _look_at(self, path: Path) -> None:
        size, when, xxh3 = self._files[path]
        about = _stat(path)
        if about is not None and (about.st_size, about.st_mtime_ns) == (size, when):
            return
        if about is None:
            raise _another(path, "It is gone.", xxh3)
        if about.st_size != size:
            raise _another(path, f"{size} bytes then, {about.st_size} now.", xxh3)
        if xxh3 is None:
            times = (
                datetime.fromtimestamp(ns / 1e9).isoformat(" ", "milliseconds") for ns in (when, about.st_mtime_ns)
            )
            raise _another(path, "Of the same size, written at {} then and at {} now.".format(*times), xxh3)
        _compare(path, xxh3)
        self._files[path] = (size, about.st_mtime_ns, xxh3)


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except FileNotFoundError:
        return None


def _compare(path: Path, xxh3: str) -> None:
    if (found := checksum(path)) != xxh3:
        raise _another(path, f"Its checksum is {found}, and the manifest says {xxh3}.", xxh3)


def _another(path: Path, why: str, xxh3: str | None) -> UserError:
    fix = "Restore the file as it was, or start a new run." if xxh3 is None else verify(path)
    return UserError(f"{path} has changed since the run began.", why, fix)
