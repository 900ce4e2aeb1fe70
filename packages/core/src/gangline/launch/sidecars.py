"""Processes beside the ranks of a machine, which outlive their restarts: a memory tier, for one. Torch-free.

A part's config asks for them (`PartConfig.sidecars`). Who starts the ranks starts them first and keeps them when the
ranks are started again; they end with the run, or with whoever started it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.launch import guard
from gangline.launch.nodes import name_of_this_node
from gangline.parts import Sidecar

if TYPE_CHECKING:
    from gangline.config.schema import Run

STOP_SECONDS = 10.0


@dataclass(frozen=True)
class Running:
    """A sidecar's process, perhaps started by an earlier rank of this machine."""

    sidecar: Sidecar
    pid: int
    process: subprocess.Popen | None


def wanted(run: Run) -> list[Sidecar]:
    """What the parts of a run ask for."""
    return [one for _, config in run.parts() for one in config.sidecars(run)]


def start(asked: list[Sidecar], run_dir: str | Path, owner: int) -> list[Running]:
    """Start sidecars that live as long as the process `owner`, unless an earlier start for it has left them running."""
    return [_start(sidecar, run_dir, owner) for sidecar in asked]


def _start(sidecar: Sidecar, run_dir: str | Path, owner: int) -> Running:
    stem = Path(run_dir, "logs", f"sidecar-{sidecar.name}-{name_of_this_node().replace('/', '-')}")
    note = stem.with_name(f"{stem.name}.json")
    if note.exists():
        known = json.loads(note.read_text())
        if known["owner"] == owner and guard.alive(known["pid"]):
            return Running(sidecar, known["pid"], None)
    words = [str(owner), str(sidecar.outlives), sidecar.target, str(run_dir), json.dumps(sidecar.args)]
    command = [sys.executable, "-m", __name__, *words]
    with stem.with_name(f"{stem.name}.log").open("a") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # an agent that ends a rank ends all of its process group
        )
    note.write_text(json.dumps({"owner": owner, "pid": process.pid}))
    return Running(sidecar, process.pid, process)


def stop(running: list[Running], seconds: float = STOP_SECONDS) -> None:
    """SIGTERM to all, SIGKILL to what is left after `seconds`."""
    for one in running:
        guard.send(one.pid, signal.SIGTERM)
    deadline = time.monotonic() + seconds
    for one in running:
        if not guard.wait_for_end(one.pid, max(0.0, deadline - time.monotonic())):
            guard.send(one.pid, signal.SIGKILL)
        if one.process is not None:
            one.process.wait()


def main(owner: str, outlives: str, target: str, run_dir: str, args: str) -> None:
    """The sidecar's own process."""
    from gangline.plugins import load

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the launcher, which ends us when the ranks have ended
    guard.die_with(int(owner), float(outlives))
    load(target)(run_dir, *json.loads(args))


if __name__ == "__main__":
    main(*sys.argv[1:])
