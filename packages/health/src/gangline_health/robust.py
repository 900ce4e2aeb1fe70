"""Robust statistics of a series, for thresholds that an outlier does not change. Torch-free.

The centre is the median of the last values. The standard deviation is estimated from the median absolute difference of
consecutive values, so a trend, such as the falling loss of early training, does not increase it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

NORMAL = 1.4826  # standard deviation of a normal distribution over its median absolute deviation
RECENT = 16  # number of values whose median is the centre


def compute_centre(values: Sequence[float]) -> float:
    """Return the median of the last `RECENT` values; needs at least one value."""
    return statistics.median(values[-RECENT:])


def compute_deviation(values: Sequence[float]) -> float:
    """Return the robust standard deviation of the noise in a series of at least two values, without its trend."""
    return NORMAL * statistics.median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)


def compute_largest_rise(values: Sequence[float]) -> float:
    """Return the largest rise between consecutive values, without rises from 0 (a batch without valid tokens)."""
    return max((b - a for a, b in pairwise(values) if a), default=0.0)
