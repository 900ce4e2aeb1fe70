"""Check of whether a process of this machine holds a run directory. Torch-free."""

from __future__ import annotations

import os
from pathlib import Path

LOCKS = Path("/proc/locks")


def is_held(run_dir: Path) -> bool:
    """Return whether a process of this machine holds the lock of a run, from /proc/locks, without touching the lock."""
    file = run_dir / ".lock"
    try:
        status = file.stat()
        lines = LOCKS.read_text().splitlines()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in lines:  # example of a line, 1: FLOCK ADVISORY WRITE 3271 fd:01:1057 0 EOF
        words = line.split()
        if "FLOCK" not in words or "->" in words:
            continue
        pid, place = words[-4], words[-3]
        if place == f"{device}:{status.st_ino}":
            return True
        if place.rpartition(":")[2] == str(status.st_ino) and _has_open(pid, file):
            return True
    return False


def _has_open(pid: str, file: Path) -> bool:
    """Return whether a process has the file open.

    /proc/locks is not enough: on btrfs and overlayfs its device numbers differ from `stat`'s.
    """
    try:
        return any(os.path.realpath(handle) == os.path.realpath(file) for handle in Path(f"/proc/{pid}/fd").iterdir())
    except PermissionError:
        return True  # a process of another user is alive
    except OSError:
        return False
