"""How a run's processes are started, as configuration. Torch-free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.errors import Problem
from gangline.parts import LaunchConfig, Part
from gangline.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class LocalLaunch(LaunchConfig):
    """Processes on this machine, watched by torch.distributed's elastic agent."""

    max_restarts: NonNegativeInt = 0  # how often ranks are started again, from the latest checkpoint, after one failed
    monitor_interval: PositiveFloat = 0.1  # seconds between two looks at the ranks
    grace_seconds: NonNegativeFloat = 60.0  # from Ctrl-C or SIGTERM to SIGKILL: for the step under way and a checkpoint

    def seconds_to_stop(self) -> float | None:
        return self.grace_seconds

    def check(self, run: Run) -> list[Problem]:
        """More ranks than GPUs."""
        problems = []
        found, wanted = gpus(run.run.device), self.processes or 0
        if 0 < found < wanted:
            problems.append(
                Problem(
                    f"launch.processes={wanted}: this machine has {found} GPU{'s' * (found > 1)}.",
                    "Each process takes a GPU of its own.",
                    f"launch.processes={found}, or run.device=cpu",
                )
            )
        return problems


def gpus(device: str | None = None, environ: Mapping[str, str] = os.environ, devices: str = "/dev") -> int:
    """How many GPUs the processes of a run may take; none for a run on the CPU.

    Counts device files instead of asking a driver: nothing here may touch a GPU.
    """
    if device is not None and device.split(":")[0] == "cpu":
        return 0
    present = sum(bool(re.fullmatch(r"nvidia\d+", path.name)) for path in Path(devices).glob("nvidia*"))
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    return len([name for name in visible.split(",") if name.strip() not in ("", "-1")])


def processes(run: Run) -> int:
    """How many processes a run starts on this machine: what the user said, else what the strategy asks for."""
    return run.launch.processes or run.parallel.world(gpus(run.run.device))


PARTS = (
    Part(
        name="local",
        group="launch",
        config=LocalLaunch,
        build="gangline.launch.local:LocalLauncher",
        summary="processes on this machine, forked from a server that has torch loaded",
    ),
)
