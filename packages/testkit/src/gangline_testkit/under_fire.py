"""Functions that a rank runs for kills during a save: of the rank, its child processes, or both."""

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
    """Kill of `whom` on rank `victim`, `seconds` after the start of a save. whom: "rank", "children" or "both"."""

    victim: int
    whom: str
    seconds: float


def save_under_fire(
    job: ranks.CheckpointerJob, salts: dict[str, int], steps: tuple[int, int, int], shot: Shot
) -> list[str]:
    """Load the newest checkpoint, then save three times, with the kill during the second save; return all outcomes.

    salts: salt of each checkpoint that may exist, by id. The first save also starts every process of the checkpointer.
    The third save runs only if the kill ended no rank.
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
    """Return the shorter duration in seconds of two saves, after a first save has started all processes."""
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
    # Wait until the processes have died, because a request to a dying process gets no answer. Then wait until the
    # parent has reaped the dead processes; a parent may reap them only when it needs them, so this wait is short.
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
