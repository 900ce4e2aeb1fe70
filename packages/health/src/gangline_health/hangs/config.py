"""Options of health.on.hangs. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

from annotated_types import Ge

from gangline import Problem
from gangline.config import OneOf, PositiveFloat

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class HangsOptions:
    """Ranks that do not come on: who, since when, in which operation; watched by a process beside the ranks."""

    on: bool = True  # whether ranks are watched
    act: Annotated[str, OneOf(("restart", "warn"))] = "restart"  # restart: kill the rank, so that the launcher starts
    floor_seconds: Annotated[float, Ge(0.5)] = 2.0  # no phase is too long before that
    quiet_seconds: PositiveFloat = 60.0  # the same of saves, validation and callbacks, which vary with disk and data
    factor: Annotated[float, Ge(1.5)] = 4.0  # a phase is too long from so many times its 99th percentile on
    unlearned_seconds: PositiveFloat = 900.0  # and before it has been seen often enough: a first step, a first save

    def find_problems(self, run: Run) -> Iterator[Problem]:
        """Limits in the wrong order: what is longer would never be reached, or cut short what is still in time."""
        place, transfer = "health.on.hangs", run.launch.timeout_seconds
        order = ("floor_seconds", "quiet_seconds", "unlearned_seconds")
        for short, long in pairwise(order):
            if getattr(self, short) > getattr(self, long):
                yield Problem(
                    f"{place}.{short}={getattr(self, short):g} is above {place}.{long}={getattr(self, long):g}.",
                    f"The limits are in this order: {', '.join(order)}, launch.timeout_seconds.",
                    f"{place}.{long}={2 * getattr(self, short):g}",
                )
        if self.unlearned_seconds >= transfer:
            yield Problem(
                f"launch.timeout_seconds={transfer:g} ends the run before {place}.unlearned_seconds="
                f"{self.unlearned_seconds:g} have passed.",
                "The transfer that waits for a rank must outlast the watch: otherwise the ranks that wait fail first, "
                "and nobody is told which one they waited for.",
                f"launch.timeout_seconds={2 * self.unlearned_seconds:g}, or {place}.unlearned_seconds={transfer / 2:g}",
            )
