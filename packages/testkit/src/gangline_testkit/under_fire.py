"""Functions that a rank runs while a save is killed at some moment: the rank, its child processes, or both."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gangline.checkpoint.base import SaveFailed
from gangline_testkit import checkpointer_ranks as ranks, rank
from gangline_testkit.processes import find_children


@dataclass(frozen=True)
class Shot:
    """A kill of `whom`, "rank", its "children", or "both", on rank `victim`, `seconds` after a save began."""

    victim: int
    whom: str
    seconds: float


def save_under_fire(
    job: ranks.CheckpointerJob, salts: dict[str, int], steps: tuple[int, int, int], shot: Shot
) -> list[str]:
    """Load the newest checkpoint, save, save during a kill, save again; return the outcome of each.

    `salts`: salt of each checkpoint that may exist. The first save also starts every process of the checkpointer.
    The last of the three saves runs if no rank was killed.
    """
    checkpointer, came = ranks.open_checkpointer(job), []
    registry = ranks.build_registry(job.mesh, job.large)
    try:
        newest = checkpointer.find_latest()
        if newest is not None:
            shards = ranks.make_shards(registry, None)
            checkpointer.load(newest, shards, registry)
            came.append(", ".join(ranks.find_wrong(shards, salts[str(newest)])))
        for number, step in enumerate(steps):
            if number == 1 and shot.victim == rank.index:
                killer = threading.Timer(shot.seconds, _kill, (shot.whom,))
                killer.start()
            try:
                handle = ranks.save_with(checkpointer, job, step, step)
                came.append(str(handle.id))
            except SaveFailed:
                came.append("SaveFailed")
            if number == 1 and shot.victim == rank.index:
                killer.join()
        return came
    finally:
        checkpointer.close()


def measure_save(job: ranks.CheckpointerJob, step: int) -> float:
    """Return the seconds of a save when every process it needs is running: the shortest of two."""
    checkpointer, seconds = ranks.open_checkpointer(job), []
    try:
        for number in range(3):
            began = time.monotonic()
            ranks.save_with(checkpointer, job, step + number, step + number)
            seconds.append(time.monotonic() - began)
        return min(seconds[1:])
    finally:
        checkpointer.close()


def _kill(whom: str) -> None:
    killed = list(find_children(os.getpid())) if whom != "rank" else []
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    if whom != "children":
        os.kill(os.getpid(), signal.SIGKILL)
    # Time to notice: a request to a process that is just dying gets no answer. On a busy machine it dies late. Its
    # parent should then reap it, but may do so only when it misses it.
    _wait(lambda: not any(_is_alive(pid) for pid in killed), 60.0)
    _wait(lambda: not any(Path(f"/proc/{pid}").exists() for pid in killed), 3.0)
    time.sleep(0.02)


def _wait(until: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not until() and time.monotonic() < deadline:
        time.sleep(0.005)


def _is_alive(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
