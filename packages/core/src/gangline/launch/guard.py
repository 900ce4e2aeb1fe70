"""Guard that kills this process when another process is gone, and functions that check whether processes are alive."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from pathlib import Path


def die_with(pid: int, grace_seconds: float = 0.0) -> None:
    """Kill this process as soon as process `pid` is gone; pid 0, a parent outside the container, is not watched.

    grace_seconds: time to clean up, from a SIGTERM to the kill; 0: no SIGTERM. A parent-death signal does not suffice,
    because the parent of a rank is the fork server, which the ranks themselves keep alive.
    """
    if pid:
        threading.Thread(target=_wait_and_die, args=(pid, grace_seconds), daemon=True, name="guard").start()


def _wait_and_die(pid: int, grace_seconds: float) -> None:
    wait_for_end(pid)
    if grace_seconds:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(grace_seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(pid: int, seconds: float | None = None) -> bool:
    """Wait up to `seconds` (None: no limit) for any process `pid`; return whether it has ended, even if unreaped."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    except (AttributeError, OSError):  # not Linux, or a container that forbids it
        return _poll(pid, float("inf") if seconds is None else time.monotonic() + seconds)
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)


def _poll(pid: int, deadline: float) -> bool:
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not is_alive(pid)


def is_alive(pid: int) -> bool:
    """Return whether a process exists; an ended process whose exit code was not read yet counts as alive."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def read_birth(pid: int) -> int | None:
    """Return the start time of a process in ticks since boot, unique with its pid; None if it is gone or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def read_namespace() -> int:
    """Return the number of this process's PID namespace; 0 if the system has none."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def send(pid: int, signum: int) -> None:
    """Send a signal to a process that may be gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signum)
