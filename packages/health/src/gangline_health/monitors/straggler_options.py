"""Options of health.monitors.stragglers, the monitor of slow ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from gangline.config import PositiveInt


@dataclass
class StragglersOptions:
    """Options of the monitor of stragglers: ranks whose own work takes longer than the work of the other ranks."""

    on: bool = True  # monitor of stragglers (slow ranks)
    # window: number of recent steps over which the median time of each rank is taken
    window: Annotated[int, Ge(4)] = 16
    # straggler threshold: minimum time of a rank as a multiple of the median of its pipeline stage
    slower: Annotated[float, Gt(1)] = 1.3
    # straggler threshold: minimum robust standard deviations above the median of the pipeline stage
    score: Annotated[float, Gt(3)] = 6.0
    # straggler threshold: minimum seconds per step above the median of the pipeline stage
    least_seconds: Annotated[float, Ge(0)] = 0.01
    again: PositiveInt = 500  # minimum number of steps between two straggler reports of the same rank
    # slow-rank threshold: minimum multiple of the median of the pipeline stage in every tenth of steady_steps
    steadily: Annotated[float, Gt(1)] = 1.03
    # number of steps in which a rank must be steadily slow for a slow-rank verdict
    steady_steps: Annotated[int, Ge(100)] = 1000
