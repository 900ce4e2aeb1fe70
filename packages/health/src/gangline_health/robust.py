"""Robust statistics of a series, for limits that one outlier does not move. Torch-free.

The centre is the median of the last values. The deviation comes from the median absolute difference of neighbours: so
a series that falls, as a loss does at first, has no wider limits than a flat one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from itertools import pairwise

NORMAL = 1.4826  # times the median absolute deviation: the standard deviation of a normal distribution
RECENT = 16  # number of values whose median is the centre


def compute_centre(values: Sequence[float]) -> float:
    """Return the median of the last `RECENT` values; needs at least one value."""
    return statistics.median(values[-RECENT:])


def compute_deviation(values: Sequence[float]) -> float:
    """Return the robust standard deviation of the noise in two or more values, without their trend."""
    return NORMAL * statistics.median(abs(b - a) for a, b in pairwise(values)) / math.sqrt(2)


def compute_largest_rise(values: Sequence[float]) -> float:
    """Return the largest rise from one value to the next, ignoring rises from 0 (a batch without valid tokens)."""
    return max((b - a for a, b in pairwise(values) if a), default=0.0)
