"""Find, wait for and kill processes that a test has started. Reads /proc."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.launch.guard import read_birth
from gangline.pulse import layout
from gangline.pulse.memory import list_pulses


@dataclass(frozen=True)
class Process:
    """Live process: the id of its parent and its command line."""

    parent: int
    command: str


def find_living(session: int) -> dict[int, Process]:
    """Return the live processes of a session, by id; ``start_new_session=True`` makes a process id a session id."""
    processes = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # the process has ended
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    processes[int(entry.name)] = Process(int(fields[1]), _read_command(entry))
    return processes


def find_children(pid: int) -> dict[int, str]:
    """Return {process id: command line} of a process's children, including zombies."""
    ids = [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]
    return {child: _read_command(Path(f"/proc/{child}")) for child in sorted(ids)}


def find_rank_processes(run_dir: Path) -> dict[int, int]:
    """Return {rank: process id} of the live ranks of a run's newest start on this machine, read from their pulses."""
    heads = [memoryview(path.read_bytes()).cast("q")[: layout.HEAD].tolist() for path in list_pulses(run_dir)]
    newest = max((head[layout.GENERATION] for head in heads), default=0)
    living = [head for head in heads if head[layout.PID] and read_birth(head[layout.PID]) == head[layout.BORN]]
    return {head[layout.RANK]: head[layout.PID] for head in living if head[layout.GENERATION] == newest}


def wait_until_none_lives(session: int, seconds: float = 60.0) -> None:
    """Wait until no process of a session is alive. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while (processes := find_living(session)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not processes, f"processes of session {session} are still alive after {seconds:g} s: {processes}"


def kill(process: subprocess.Popen[Any]) -> None:
    """Send SIGKILL to the process group of a group leader, and wait for the leader, which may have ended already."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read_command(entry: Path) -> str:
    with contextlib.suppress(OSError):
        return (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
