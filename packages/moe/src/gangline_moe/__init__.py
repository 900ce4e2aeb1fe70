"""Mixture of experts (MoE) for gangline: hooks only, no torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, Kind, Part, hookimpl
from gangline_moe import parts, presets
from gangline_moe.routers import config as routers


@hookimpl
def gangline_model_edits() -> Iterable[Part]:
    return presets.PARTS


@hookimpl
def gangline_parts() -> Iterable[Part]:
    return routers.PARTS


@hookimpl
def gangline_trackers() -> Iterable[Part]:
    return parts.TRACK


@hookimpl
def gangline_health_checks() -> Iterable[Part]:
    return parts.HEALTH


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return [
        Command(name="moe", run="gangline_moe.report:main", summary="Report how evenly the experts of a run are loaded")
    ]


@hookimpl
def gangline_kinds() -> Iterable[Kind]:
    yield Kind(
        name="router",
        group=routers.GROUP,
        suite="gangline_moe.testing:RouterSuite",
        example="gangline_moe.examples.turns",
        summary="selects the experts of each token",
    )
