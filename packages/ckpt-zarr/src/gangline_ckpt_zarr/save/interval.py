"""Checkpoint interval of `checkpoint.every=auto`: how often a save pays.

A save costs the run d seconds; a failure, one every M seconds, costs it on average half the time since the last save.
The sum is least when T seconds lie between saves:

    T = sqrt(2 d M)                                                        Young, CACM 17(9), 1974
    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d,  d < 2M     Daly, FGCS 22(3), 2006, eq. 37

d is measured: the time a step is blocked and what steps lose while a save is being written. M is given, or estimated
from the run's own starts, of which the first is not a failure; with a prior of one failure a day, (24 h + time) / (1 +
failures).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gangline.run import attempts

PRIOR_SECONDS = 24 * 3600.0  # between failures, before any has happened
FIRST_COST = 1.0  # seconds, before any save was measured
REMEMBERED = 8  # saves whose median cost counts


def compute_best_interval(cost: float, mtbf: float) -> float:
    """Return the seconds between saves of `cost` seconds each, with a failure every `mtbf` seconds on average."""
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def measure_mtbf(run_dir: str | Path, now: datetime | None = None) -> float:
    """Return the mean seconds between failures, as attempts.jsonl of the run shows them."""
    lines = [line for line in attempts.read(run_dir) if line.order in ("", "roll_back")]  # a restart is a start as well
    times = [time for line in lines if (time := attempts.parse_time(line)) is not None]
    if not times:
        return PRIOR_SECONDS
    seconds = (now or datetime.now(UTC)).timestamp() - times[0]
    return (PRIOR_SECONDS + max(0.0, seconds)) / len(times)


class Interval:
    """Says when the next save pays. Its clock counts seconds of training steps, so a pause is no reason to save."""

    def __init__(self, mtbf: float) -> None:
        self.mtbf = mtbf
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._quiet: deque[float] = deque(maxlen=64)  # seconds of steps without a save in the background
        self._busy: list[float] = []  # seconds of steps during the running save
        self._blocked = 0.0
        self._open = False  # whether the newest save's cost is still to be counted
        self._since = 0.0

    @property
    def cost(self) -> float:
        """Cost of a save in seconds."""
        return statistics.median(self._costs) if self._costs else FIRST_COST

    @property
    def seconds(self) -> float:
        """Number of seconds between two saves."""
        return compute_best_interval(self.cost, self.mtbf)

    def is_due(self, seconds: float, saving: bool, copying: bool = False) -> bool:
        """Return whether to save after a step of `seconds`, with a save or its copy to the durable tier running or not.

        What steps lose during a copy is part of the save's cost, but no reason to delay the next save.
        """
        if self._open and not (saving or copying):
            self._count()
        (self._busy if saving or copying else self._quiet).append(seconds)
        self._since += seconds
        return not saving and self._since + seconds / 2 >= self.seconds

    def note_save(self, blocked: float) -> None:
        """Record a save that has begun and blocked the step for `blocked` seconds."""
        if self._open:  # the previous copy is still running: count its cost so far
            self._count()
        self._busy.clear()  # steps during saves that are not timed here
        self._blocked, self._since, self._open = blocked, 0.0, True

    def _count(self) -> None:
        self._costs.append(self._blocked + compute_slowdown(self._busy, self._quiet))
        self._busy.clear()
        self._open = False


def compute_slowdown(busy: Sequence[float], quiet: Sequence[float]) -> float:
    """Return the seconds that steps during a save took longer than other steps; at least 0."""
    if not busy or not quiet:
        return 0.0
    usual = statistics.median(quiet)
    return max(0.0, sum(busy) - usual * len(busy))
