"""Semaphores in shared memory: a start removes those of killed launchers and leaves those of live ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from gangline_basics.launch import semaphores

MADE = """
import multiprocessing, sys
from gangline_basics.launch import semaphores
semaphores.name_semaphores()
queue = multiprocessing.get_context("forkserver").SimpleQueue()
print(queue._rlock._semlock.name, flush=True)
sys.stdin.read()
"""


def started() -> tuple[subprocess.Popen, str]:
    """Start a process group with semaphores; return the process and the name of one semaphore."""
    process = subprocess.Popen(
        [sys.executable, "-c", MADE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    return process, f"sem.{process.stdout.readline().strip().removeprefix('/')}"


def test_sweep_removes_semaphores_of_dead_launchers_only():
    dead, left = started()
    living, kept = started()
    try:
        os.killpg(dead.pid, signal.SIGKILL)  # also kills the tracker, which would remove the semaphores
        dead.wait()
        assert (semaphores.ROOT / left).exists(), "nobody else removes it"
        other = semaphores.ROOT / f"{left.replace('gangline', 'else')}"
        other.write_bytes(b"")
        semaphores.sweep()
        assert not (semaphores.ROOT / left).exists()
        assert (semaphores.ROOT / kept).exists()
        assert other.exists(), "a file of an unknown program must stay"
        other.unlink()
    finally:
        living.communicate("")
    assert not (semaphores.ROOT / kept).exists()
