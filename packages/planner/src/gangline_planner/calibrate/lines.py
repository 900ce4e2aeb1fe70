"""Straight lines through measurements. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence


def intercept_and_slope(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(seconds at nothing, seconds of each more) by least squares of relative errors; neither below nothing.

    Relative: a small message counts as much as a large one.
    """
    weights = [1 / y**2 for _, y in points]
    total = sum(weights)
    x = sum(w * a for w, (a, _) in zip(weights, points, strict=True)) / total
    y = sum(w * b for w, (_, b) in zip(weights, points, strict=True)) / total
    spread = sum(w * (a - x) ** 2 for w, (a, _) in zip(weights, points, strict=True))
    slope = sum(w * (a - x) * (b - y) for w, (a, b) in zip(weights, points, strict=True)) / spread if spread else 0.0
    if slope <= 0:  # no more for more: the largest alone says what each takes
        most = max(points)
        return 0.0, most[1] / most[0]
    return max(0.0, y - slope * x), slope
