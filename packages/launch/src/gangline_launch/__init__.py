"""Launchers `slurm` and `kubernetes`, and the command `gangline launch`: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_launch.kubernetes.config import KubernetesLaunch
from gangline_launch.slurm.config import SlurmLaunch


@hookimpl
def gangline_launchers() -> Iterable[Part]:
    yield Part(
        name="slurm",
        config=SlurmLaunch,
        build="gangline_launch.slurm.launcher:SlurmLauncher",
        summary="a Slurm job with an elastic agent on each node",
    )
    yield Part(
        name="kubernetes",
        config=KubernetesLaunch,
        build="gangline_launch.kubernetes.launcher:KubernetesLauncher",
        summary="a Kubernetes JobSet, queued by Kueue, with an elastic agent in each pod",
    )


@hookimpl
def gangline_commands() -> Iterable[Command]:
    summary = "Follow, inspect or cancel the job of a run on a cluster"
    return [Command(name="launch", run="gangline_launch.commands:main", summary=summary)]
