"""Sidecars: processes next to the ranks of a machine that outlive restarts, such as a memory tier. Torch-free.

A part's config requests sidecars (`PartConfig.list_sidecars`). The launcher starts sidecars before the ranks, and keeps
them running when the ranks are restarted; sidecars end with the run, or with the launcher.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.config.answers import Sidecar
from gangline.launch import guard
from gangline.launch.network import name_of_this_node
from gangline.storage.files import open_own, read_regular

if TYPE_CHECKING:
    from gangline.config.schema import Run

STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Running:
    """Process of a sidecar, perhaps started by an earlier rank of this machine."""

    sidecar: Sidecar
    pid: int
    process: subprocess.Popen | None
    born: int | None  # start time (`guard.read_birth`); pid and start time identify the process


def list_sidecars(run: Run) -> list[Sidecar]:
    """Return the sidecars that the parts of a run request."""
    return [one for _, config in run.iterate_parts() for one in config.list_sidecars(run)]


def start(sidecars: list[Sidecar], run_dir: str | Path, owner: int) -> list[Running]:
    """Start sidecars that end with the process `owner`, unless they still run from an earlier start for `owner`."""
    return [_start(sidecar, run_dir, owner) for sidecar in sidecars]


def _start(sidecar: Sidecar, run_dir: str | Path, owner: int) -> Running:
    stem = Path(run_dir, "logs", f"sidecar-{sidecar.name}-{name_of_this_node().replace('/', '-')}")
    note = stem.with_name(f"{stem.name}.json")
    if (pid := _find_left(note, owner)) is not None:
        return Running(sidecar, pid, None, guard.read_birth(pid))
    words = [str(owner), str(sidecar.outlives), sidecar.target, str(run_dir), json.dumps(sidecar.args)]
    command = [sys.executable, "-P", "-m", __name__, *words]  # -P: import no module of the working directory
    with open_own(stem.with_name(f"{stem.name}.log"), "a") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # otherwise an agent that kills a rank's process group would kill the sidecar
        )
    content = {"owner": _name(owner), "sidecar": _name(process.pid)}
    new = note.with_name(f"{note.name}.{process.pid}")
    with open_own(new, "w") as file:
        json.dump(content, file)
    new.replace(note)
    return Running(sidecar, process.pid, process, guard.read_birth(process.pid))


def _name(pid: int) -> list[int | None]:
    """Return a unique identity of a process, because process ids are reused, and are equal on several machines."""
    return [pid, guard.read_birth(pid), guard.read_namespace()]


def _find_left(note: Path, owner: int) -> int | None:
    """Return the process id of the sidecar that an earlier start for `owner` has left running, or None."""
    try:
        content = json.loads(read_regular(note))
        owner_name, pid = content["owner"], int(content["sidecar"][0])
        there = owner_name == _name(owner) and content["sidecar"] == _name(pid) and guard.is_alive(pid)
        ours = guard.read_birth(pid) is None or os.stat(f"/proc/{pid}").st_uid == os.getuid()  # None: no /proc
        return pid if there and ours else None
    except (OSError, ValueError, TypeError, KeyError, IndexError):
        return None


def stop(running: list[Running], seconds: float = STOP_SECONDS) -> None:
    """Send SIGTERM to all sidecars, and SIGKILL to sidecars that are still alive after `seconds`."""
    running = [one for one in running if one.process is not None or guard.read_birth(one.pid) == one.born]
    for one in running:
        guard.send(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for one in running:
        if not guard.wait_for_end(one.pid, max(0.0, deadline - time.monotonic())):
            guard.send(one.pid, signal.SIGKILL)
        if one.process is not None:
            one.process.wait()


def main(owner: str, outlives: str, target: str, run_dir: str, args: str) -> None:
    """Run a sidecar in its own process."""
    from gangline.plugin.registry import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends sidecars after the ranks
    guard.die_with(int(owner), float(outlives))
    load(target)(run_dir, *json.loads(args))


if __name__ == "__main__":
    main(*sys.argv[1:])
