"""Least-squares fit of two costs to measurements. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

Point = tuple[float, float, float, float]  # (a, b, t, whole): see `fit_two_costs`


def fit_two_costs(points: Sequence[Point]) -> tuple[float, float]:
    """Return (x, y), both at least 0, such that a x + b y is close to t for all points (a, b, t, whole).

    `whole` is a measured time, and t the part of it that x and y explain. Minimises the sum of
    ((a x + b y - t) / whole)^2, so that short measurements count as much as long ones. Raises ValueError if all a and b
    are 0.
    """
    scaled = [(a / whole, b / whole, t / whole) for a, b, t, whole in points]
    aa, bb = sum(a * a for a, _, _ in scaled), sum(b * b for _, b, _ in scaled)
    ab = sum(a * b for a, b, _ in scaled)
    at, bt = sum(a * t for a, _, t in scaled), sum(b * t for _, b, t in scaled)
    if not aa and not bb:
        raise ValueError("all coefficients of both costs are 0")
    spread = aa * bb - ab * ab
    if spread > 1e-12 * aa * bb:
        x, y = (at * bb - bt * ab) / spread, (bt * aa - at * ab) / spread
        if x >= 0 and y >= 0:
            return x, y
    only_x, only_y = (max(0.0, at / aa) if aa else 0.0, 0.0), (0.0, max(0.0, bt / bb) if bb else 0.0)
    return min(only_x, only_y, key=lambda found: sum((a * found[0] + b * found[1] - t) ** 2 for a, b, t in scaled))
