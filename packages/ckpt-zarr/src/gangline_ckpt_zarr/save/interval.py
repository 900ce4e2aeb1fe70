"""Checkpoint interval of `checkpoint.every=auto`: the interval that costs the run the least time.

A save costs d seconds. A failure, on average one every M seconds, costs on average half the interval between saves.
The sum is smallest if the interval between saves is T seconds:

    T = sqrt(2 d M)                                                        Young, CACM 17(9), 1974
    T = sqrt(2 d M) (1 + sqrt(d / 2M) / 3 + (d / 2M) / 9) - d,  d < 2M     Daly, FGCS 22(3), 2006, eq. 37

d is measured: the time for which a save blocks the step, plus the slowdown of steps while the save is written. M is
`checkpoint.mtbf_hours`, or estimated from the run: each start after the first and each rollback counts as a failure.
With a prior of one failure per day, M = (24 h + time since the first start) / (1 + failures).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from gangline.run import attempts

PRIOR_SECONDS = 24 * 3600.0  # mean seconds between failures, assumed before any failure
FIRST_COST = 1.0  # cost of a save in seconds, assumed before any save was measured
REMEMBERED = 8  # number of newest saves whose median cost counts


def compute_best_interval(cost: float, mtbf: float) -> float:
    """Return the best interval in seconds, if a save costs `cost` seconds and a failure occurs every `mtbf` seconds."""
    if cost >= 2 * mtbf:
        return mtbf
    share = cost / (2 * mtbf)
    return math.sqrt(2 * cost * mtbf) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def measure_mtbf(run_dir: str | Path, now: datetime | None = None) -> float:
    """Return the mean seconds between failures, estimated from the starts and rollbacks in attempts.jsonl."""
    # A requested restart is not counted, because the next start is.
    lines = [line for line in attempts.read(run_dir) if line.action in ("", "roll_back")]
    times = [time for line in lines if (time := attempts.parse_time(line)) is not None]
    if not times:
        return PRIOR_SECONDS
    seconds = (now or datetime.now(UTC)).timestamp() - times[0]
    return (PRIOR_SECONDS + max(0.0, seconds)) / len(times)


class Interval:
    """Schedule of saves for every=auto. Its clock counts only seconds of training steps: a pause triggers no save."""

    def __init__(self, mtbf: float) -> None:
        self.mtbf = mtbf
        self._costs: deque[float] = deque(maxlen=REMEMBERED)
        self._quiet: deque[float] = deque(maxlen=64)  # seconds of each step without a save in the background
        self._busy: list[float] = []  # seconds of each step during the running save
        self._blocked = 0.0
        self._open = False  # whether the newest save's cost is still to be counted
        self._since = 0.0

    @property
    def cost(self) -> float:
        """Cost of a save in seconds."""
        return statistics.median(self._costs) if self._costs else FIRST_COST

    @property
    def seconds(self) -> float:
        """Best number of seconds between two saves."""
        return compute_best_interval(self.cost, self.mtbf)

    def is_due(self, seconds: float, saving: bool, copying: bool = False) -> bool:
        """Return whether a save is due after a step that took `seconds` seconds.

        `saving`: whether a save is being written; then no further save is due. `copying`: whether a copy to the
        durable tier is running: the slowdown of steps counts as cost of the save, but does not delay the next save.
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
        self._busy.clear()  # steps during saves whose cost is not measured
        self._blocked, self._since, self._open = blocked, 0.0, True

    def _count(self) -> None:
        self._costs.append(self._blocked + compute_slowdown(self._busy, self._quiet))
        self._busy.clear()
        self._open = False


def compute_slowdown(busy: Sequence[float], quiet: Sequence[float]) -> float:
    """Return the sum of the seconds by which steps during a save exceed the median of other steps; at least 0."""
    if not busy or not quiet:
        return 0.0
    usual = statistics.median(quiet)
    return max(0.0, sum(busy) - usual * len(busy))
