"""Summarise the errors of predictions: medians, tails, and drift with the number of GPUs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import mean, median


@dataclass(frozen=True)
class Judged:
    """A row next to its prediction: step time in seconds, memory in bytes of the rank with most memory."""

    id: str
    table: str
    world: int
    published: float
    predicted: float
    published_bytes: float | None
    predicted_bytes: float | None
    calibrated: bool  # whether cluster values were fitted to the row
    assumed: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Return predicted over published step time, minus 1."""
        return self.predicted / self.published - 1

    @property
    def memory_error(self) -> float | None:
        if not self.published_bytes or not self.predicted_bytes:
            return None
        return self.predicted_bytes / self.published_bytes - 1


@dataclass(frozen=True)
class Spread:
    """Median and 90th percentile of absolute errors; mean of the signed errors."""

    rows: int
    median: float
    ninetieth: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Spread:
        sizes = sorted(map(abs, errors))
        return cls(len(sizes), median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], mean(errors))

    @classmethod
    def of_rows(cls, rows: Sequence[Judged]) -> Spread:
        """Return the spread of the errors of step times."""
        return cls.of([row.error for row in rows])


def slope(rows: Sequence[Judged]) -> float:
    """Return the least-squares slope of the signed error over the logarithm of the number of GPUs.

    The slope is 0 if all rows have the same number of GPUs.
    """
    xs, ys = [log(row.world) for row in rows], [row.error for row in rows]
    x, y = mean(xs), mean(ys)
    spread = sum((one - x) ** 2 for one in xs)
    return sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True)) / spread if spread else 0.0


def slope_interval(rows: Sequence[Judged], draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """Return the middle 95 % of the slopes of a bootstrap over tables."""
    tables = _tables(rows)
    chance, names = random.Random(seed), sorted(tables)
    found = sorted(
        slope([row for name in chance.choices(names, k=len(names)) for row in tables[name]]) for _ in range(draws)
    )
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def by_table(rows: Sequence[Judged]) -> Mapping[str, Spread]:
    """Return the spread of the step-time errors of each table, in the order of the tables."""
    return {name: Spread.of_rows(own) for name, own in _tables(rows).items()}


def _tables(rows: Sequence[Judged]) -> dict[str, list[Judged]]:
    tables: dict[str, list[Judged]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    return tables
