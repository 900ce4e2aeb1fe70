"""Options of health.on.stragglers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Gt

from gangline.config import PositiveInt


@dataclass
class StragglersOptions:
    """Ranks that keep the others waiting, from their own times in each phase."""

    on: bool = True  # whether these are watched
    window: Annotated[int, Ge(4)] = 16  # steps of which the median counts
    slower: Annotated[float, Gt(1)] = 1.3  # so many times the median of the ranks, at least
    score: Annotated[float, Gt(3)] = 6.0  # and so many robust deviations of the ranks above it
    least_seconds: Annotated[float, Ge(0)] = 0.01  # a difference below this is nobody's concern
    again: PositiveInt = 500  # steps until the same rank is told again
    steadily: Annotated[float, Gt(1)] = 1.03  # so much slower in each tenth of steady_steps: slow-rank
    steady_steps: Annotated[int, Ge(100)] = 1000  # steps that it must be so much slower, all the time
