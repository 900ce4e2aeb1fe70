"""Options of health.monitors.stragglers, the monitor of slow ranks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from gangline.config import PositiveInt


@dataclass
class StragglersOptions:
    """Options of the monitor of slow ranks, which keep others waiting, by their own time in each phase."""

    on: bool = True  # monitor of slow ranks (stragglers)
    window: Annotated[int, Ge(4)] = 16  # window: number of recent steps whose median time is compared between ranks
    slower: Annotated[float, Gt(1)] = 1.3  # minimum multiple of the median rank's time for a straggler
    score: Annotated[float, Gt(3)] = 6.0  # minimum robust deviations above the median for a straggler
    least_seconds: Annotated[float, Ge(0)] = 0.01  # minimum difference from the median for a straggler, in seconds
    again: PositiveInt = 500  # steps before a rank is reported again
    steadily: Annotated[float, Gt(1)] = 1.03  # minimum multiple of the median in each tenth of steady_steps: slow-rank
    steady_steps: Annotated[int, Ge(100)] = 1000  # number of steps over which a rank must be steadily slow
