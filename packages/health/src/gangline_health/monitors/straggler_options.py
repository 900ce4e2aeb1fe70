"""Options of health.monitors.stragglers, the monitor of slow ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from gangline.config import PositiveInt


@dataclass
class StragglersOptions:
    """Options of the monitor of stragglers: ranks whose step time exceeds the median of their pipeline stage.

    Step times in these options exclude a rank's waits for other ranks, and saves.
    """

    on: bool = True  # monitor of stragglers (slow ranks)
    # window: number of recent steps over which each rank's median step time is taken, without waits for other ranks
    window: Annotated[int, Ge(4)] = 16
    # straggler threshold: minimum ratio of a rank's median step time to its pipeline stage's median
    min_ratio: Annotated[float, Gt(1)] = 1.3
    # straggler threshold: minimum excess of a rank's step time over its stage's median, in robust standard deviations
    min_score: Annotated[float, Gt(3)] = 6.0
    # straggler threshold: minimum excess of a rank's median step time over its pipeline stage's median, in seconds
    min_seconds: Annotated[float, Ge(0)] = 0.01
    report_every: PositiveInt = 500  # minimum number of steps between two straggler reports of the same rank
    # slow-rank threshold: minimum ratio of a rank's median step time to its stage's median, in each of 10 windows
    steady_ratio: Annotated[float, Gt(1)] = 1.03
    # number of steps, split into 10 windows, in which a rank must reach `steady_ratio` for a slow-rank verdict
    steady_steps: Annotated[int, Ge(100)] = 1000
