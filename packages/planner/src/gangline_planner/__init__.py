"""Pluggy hooks of gangline-planner: the command `plan`. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable

from gangline import Command, hookimpl


@hookimpl
def gangline_commands() -> Iterable[Command]:
    return [
        Command(
            name="plan",
            run="gangline_planner.commands:main",
            summary="Predict memory, step time, cost and failures of a run, without a GPU",
        )
    ]
