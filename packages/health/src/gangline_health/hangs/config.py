"""Options of health.monitors.hangs, the hang watcher. Torch-free."""

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
    """Hang detection by a process next to the ranks: reports the hung rank, its operation and since when it hangs."""

    on: bool = True  # hang watcher: a process next to the ranks that detects hung ranks
    # action on a hung rank; restart: kill it, and the launcher restarts the ranks
    act: Annotated[str, OneOf(("restart", "warn"))] = "restart"
    floor_seconds: Annotated[float, Ge(0.5)] = 2.0  # minimum hang timeout of any phase of a step, in seconds
    quiet_seconds: PositiveFloat = 60.0  # minimum hang timeout of saves, validation and callbacks, in seconds
    factor: Annotated[float, Ge(1.5)] = 4.0  # hang timeout of a phase, as a multiple of its duration's 99th percentile
    # hang timeout of a phase with too few measured durations (the first step or save), in seconds
    unlearned_seconds: PositiveFloat = 900.0

    def find_problems(self, run: Run) -> Iterator[Problem]:
        """Yield a problem for each pair of timeouts in the wrong order; launch.timeout_seconds must be the longest."""
        place, transfer = "health.monitors.hangs", run.launch.timeout_seconds
        order = ("floor_seconds", "quiet_seconds", "unlearned_seconds")
        for short, long in pairwise(order):
            if getattr(self, short) > getattr(self, long):
                yield Problem(
                    f"{place}.{short}={getattr(self, short):g} must be at most {place}.{long}={getattr(self, long):g}.",
                    f"These timeouts must increase in this order: {', '.join(order)}, launch.timeout_seconds.",
                    f"{place}.{long}={2 * getattr(self, short):g}",
                )
        if self.unlearned_seconds >= transfer:
            yield Problem(
                f"launch.timeout_seconds={transfer:g} must be longer than {place}.unlearned_seconds="
                f"{self.unlearned_seconds:g}.",
                "Otherwise the collectives of the waiting ranks time out before the hang watcher "
                "reports the hung rank.",
                f"launch.timeout_seconds={2 * self.unlearned_seconds:g}, or {place}.unlearned_seconds={transfer / 2:g}",
            )
