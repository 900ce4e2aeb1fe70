"""How far off predictions are: medians, tails, and whether they drift with the number of GPUs."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log
from statistics import mean, median


@dataclass(frozen=True)
class Judged:
    """A row beside its prediction, seconds of a step and bytes of the fullest rank."""

    id: str
    table: str
    world: int
    published: float
    predicted: float
    published_bytes: float | None
    predicted_bytes: float | None
    calibrated: bool  # whether parameters were fitted on it
    assumed: tuple[str, ...] = ()

    @property
    def error(self) -> float:
        """Predicted over published, less 1."""
        return self.predicted / self.published - 1

    @property
    def memory_error(self) -> float | None:
        if not self.published_bytes or not self.predicted_bytes:
            return None
        return self.predicted_bytes / self.published_bytes - 1


@dataclass(frozen=True)
class Spread:
    """Of the absolute errors: median, 90th percentile; mean of the signed ones."""

    rows: int
    median: float
    ninetieth: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> Spread:
        sizes = sorted(map(abs, errors))
        return cls(len(sizes), median(sizes), sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))], mean(errors))


def slope(rows: Sequence[Judged]) -> float:
    """How much the signed error grows with each factor e in GPUs, by least squares; 0 where the numbers are all one."""
    xs, ys = [log(row.world) for row in rows], [row.error for row in rows]
    x, y = mean(xs), mean(ys)
    spread = sum((one - x) ** 2 for one in xs)
    return sum((one - x) * (other - y) for one, other in zip(xs, ys, strict=True)) / spread if spread else 0.0


def slope_interval(rows: Sequence[Judged], draws: int = 1000, seed: int = 0) -> tuple[float, float]:
    """95 % of the slopes of a bootstrap over tables."""
    tables: dict[str, list[Judged]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row)
    chance, names = random.Random(seed), sorted(tables)
    found = sorted(
        slope([row for name in chance.choices(names, k=len(names)) for row in tables[name]]) for _ in range(draws)
    )
    return found[int(0.025 * draws)], found[int(0.975 * draws)]


def by_table(rows: Sequence[Judged]) -> Mapping[str, Spread]:
    """The spread of step times of each table, in the order of the tables."""
    tables: dict[str, list[float]] = {}
    for row in rows:
        tables.setdefault(row.table, []).append(row.error)
    return {name: Spread.of(errors) for name, errors in tables.items()}
