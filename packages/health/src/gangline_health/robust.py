"""Robust statistics of a series: what a value is judged by where one outlier must not move the limit. Torch-free.

The centre is the median of the last values, the deviation comes from the differences of neighbours (their median
absolute value): so a series that falls, as a loss does at first, has no wider limits than one that does not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

NORMAL = 1.4826  # the median absolute deviation x this is the standard deviation of a normal distribution
RECENT = 16  # values whose median is the centre


def compute_centre(values: Sequence[float]) -> float:
    """Median of the last values; of at least one."""
    return statistics.median(values[-RECENT:])


def compute_deviation(values: Sequence[float]) -> float:
    """Robust standard deviation of the noise in a series of two or more values; its trend does not count."""
    return NORMAL * statistics.median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)


def compute_largest_rise(values: Sequence[float]) -> float:
    """The largest step upwards from one value to the next; not from 0, as of a batch in which no token counts."""
    return max((b - a for a, b in pairwise(values) if a), default=0.0)
