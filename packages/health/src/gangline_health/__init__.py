"""Pluggy hooks of gangline-health: health checks, failure simulator, command `health`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Part, hookimpl
from gangline_health import config, simulate


@hookimpl
def gangline_health_checks() -> Iterable[Part]:
    return config.PARTS


@hookimpl
def gangline_simulators() -> Iterable[Part]:
    return [simulate.PART]


@hookimpl
def gangline_commands() -> Iterable[Command]:
    summary = "Report the time of a run, show its live status, run burn-in, simulate failures"
    return [Command(name="health", run="gangline_health.commands:main", summary=summary)]
