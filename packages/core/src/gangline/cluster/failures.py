"""What failures cost, in closed form: how often to save, and what share of the time is progress.

Young, CACM 17 (1974); Daly, Future Generation Computer Systems 22 (2006); the share as in Kokolis et al.,
arXiv 2410.21680 (effective training time ratio).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Shares of the wall time, which add up to 1, and how long between two saves makes progress largest.

    interval  seconds between saves; stall: of saving; redone: work that failures threw away; restart: of coming back
    """

    interval: float
    progress: float
    stall: float
    redone: float
    restart: float


def losses(*, stall: float, between_failures: float, restart: float) -> Losses:
    """stall: seconds that a save holds the run up; between_failures: mean seconds between failures of the whole job.

    The interval is Young's, sqrt(2 stall M), and half of it is lost with each failure. Raises ValueError for times that
    are not positive, and where a failure comes before the run is back.
    """
    if stall <= 0 or between_failures <= 0 or restart < 0:
        raise ValueError("a save and the time between failures take longer than nothing")
    interval = sqrt(2 * stall * between_failures)
    cycle = interval + stall
    failures = 1 / between_failures  # a second of wall time
    lost = failures * (cycle / 2 + restart)
    if lost >= 1:
        raise ValueError("a failure comes before the work since the last one is done again")
    working = 1 - lost
    return Losses(
        interval=interval,
        progress=working * interval / cycle,
        stall=working * stall / cycle,
        redone=failures * cycle / 2,
        restart=failures * restart,
    )
