"""`launch=local`: ranks on this machine, forked from a preloaded server. Torch is imported when ranks start."""

from __future__ import annotations

import os
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.config.schema import Run
from gangline.launch.base import Launcher
from gangline.pulse import memory
from gangline_basics.launch import forkserver, sidecars
from gangline_basics.launch.config import LocalLaunch
from gangline_basics.launch.starts import Starts
from gangline_basics.launch.worker import WORK

if TYPE_CHECKING:
    from gangline.run.directory import RunDirectory


class LocalLauncher(Launcher):
    """Launcher of processes on this machine under torch.distributed's elastic agent, which runs in this process."""

    def __init__(self, config: LocalLaunch, run: Run) -> None:
        self.config = config
        self.run = run

    def launch(self, directory: RunDirectory) -> int:
        """Train the run in `directory`, and return the exit code of `start`."""
        run_dir = directory.path
        forkserver.warm(forkserver.find_needed(self.run))
        running = sidecars.start(sidecars.list_sidecars(self.run), run_dir, owner=os.getpid())
        try:
            return start(run_dir, self.run.launch.count_ranks(self.run), self.config)
        finally:
            sidecars.stop(running)
            memory.remove(os.getpid())


def start(
    run_dir: str | Path,
    world: int,
    config: LocalLaunch | None = None,
    target: str = WORK,
    args: tuple[Any, ...] = (),
) -> int:
    """Run `target(run_dir, *args)` on `world` ranks, and return the exit code of the run.

    The exit code is 0 if all ranks finished, 128 + n after signal n, the code with which the ranks themselves ended, or
    else 1. A rank's UserError is raised here. The error of the rank that failed first is printed and in the rank's log.
    """
    forkserver.warm()
    from gangline_basics.launch.elastic import (  # imports torch while the server imports torch in parallel
        AgentNode,
        run_agent,
    )
    from gangline_basics.launch.solo import SoloRendezvous

    config, starts = config or LocalLaunch(), count(1)
    decides = Starts(Path(run_dir).resolve(), config, lambda ranks: (ranks, []), say)
    return run_agent(decides, AgentNode("", world, SoloRendezvous(), lambda: next(starts)), config, target, args)


def say(text: str) -> None:
    """Print a text to stderr."""
    print(text, file=sys.stderr, flush=True)
