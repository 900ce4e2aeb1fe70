"""Detection of changes to files that a run has mapped."""

from __future__ import annotations

import os
import time
from datetime import datetime
from pathlib import Path

from gangline import UserError
from gangline_dataloader.store.npy import compute_checksum, format_verify_command

EVERY = 60.0  # maximum seconds between two checks; a check makes a file system call for each file
OFTEN = 1.0  # minimum seconds between two checks
COST = 0.01  # maximum fraction of the time spent on checks, except at the maximum interval EVERY


class WatchedFiles:
    """Watcher of files: compares sizes, mtimes and ctimes every second, or at least every minute if checks are slow.

    A changed size is an error. If mtime or ctime has changed, the checksum is verified; without a checksum, a changed
    mtime is an error and ctime is ignored. A mapped file that is truncated between a check and a read ends the process
    with SIGBUS, and the next start of the run reports the file.

    cached  whether the files are in the shard cache, which verified their checksums when it opened them, may remove
            them, and changes their ctime when it records their last use: ctime and removal are then ignored
    """

    def __init__(self, cached: bool = False) -> None:
        self._cached = cached
        self._began, self._next = time.time(), time.monotonic() + OFTEN
        self._files: dict[Path, tuple[int, int, int, str | None]] = {}  # size, mtime and ctime in ns, checksum
        self._changed: UserError | None = None

    def add(self, path: Path, xxh3: str | None, before: os.stat_result | None = None) -> None:
        """Add an opened file; the checksum of a file written since the run began is verified at once.

        xxh3    checksum of the file; None: unknown, so that any change of size or mtime is an error
        before  status of the file before its checksum was verified; a change since then is checked now
        Raises UserError if the bytes of the file have changed.
        """
        if (about := before or find_status(path)) is None and self._cached:
            return
        about = about or path.stat()
        if xxh3 is not None and about.st_mtime > self._began and not self._cached:
            self._compare(path, xxh3)
        self._files[path] = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, xxh3)
        if before is not None:
            self._look_at(path)

    def look(self) -> None:
        """Check all files if the interval has passed. Raises UserError if a file has changed, also later."""
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
        end = time.monotonic()
        self._next = end + min(EVERY, max(OFTEN, (end - now) / COST))

    def look_at(self, path: Path) -> None:
        """Check one file now, for files that are opened for each read. Raises UserError like `look`."""
        try:
            self._look_at(path)
        except UserError as error:
            self._changed = error
            raise

    def _look_at(self, path: Path) -> None:
        size, when, touched, xxh3 = self._files[path]
        about = find_status(path)
        # Resetting mtime still changes ctime. Without a checksum ctime is ignored, because chmod changes it as well.
        deaf = xxh3 is None or self._cached
        if about and (about.st_size, about.st_mtime_ns) == (size, when) and (deaf or about.st_ctime_ns == touched):
            return
        if about is None and self._cached:
            self._files.pop(path, None)
            return
        if about is None:
            raise self._explain_change(path, "The file is missing.", xxh3)
        if about.st_size != size:
            raise self._explain_change(path, f"Size before: {size} bytes. Size now: {about.st_size} bytes.", xxh3)
        if xxh3 is None:
            times = (
                datetime.fromtimestamp(ns / 1e9).isoformat(" ", "milliseconds") for ns in (when, about.st_mtime_ns)
            )
            raise self._explain_change(
                path, "The size is the same. Modification time before: {}; now: {}.".format(*times), xxh3
            )
        self._compare(path, xxh3)
        self._files[path] = (size, about.st_mtime_ns, about.st_ctime_ns, xxh3)

    def _compare(self, path: Path, xxh3: str) -> None:
        if (checksum := compute_checksum(path)) != xxh3:
            raise self._explain_change(path, f"The checksum is {checksum}, and the manifest records {xxh3}.", xxh3)

    def _explain_change(self, path: Path, why: str, xxh3: str | None) -> UserError:
        fix = "Restore the original file, or start a new run." if xxh3 is None else format_verify_command(path)
        if self._cached:
            fix = "Restart the run: it fetches damaged files of the shard cache again."
        return UserError(f"{path} has changed since the run began.", why, fix)


def find_status(path: Path) -> os.stat_result | None:
    """Return the status of a file; None if it is missing."""
    try:
        return path.stat()
    except FileNotFoundError:
        return None
