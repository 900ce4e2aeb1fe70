"""Fit the values of the shipped cluster files that are in no datasheet to published step times, and write the files.

    python benchmarks/planner_fit.py published.json [--rounds 12] [--cross]

There are few values, each with a meaning (`NUMBERS` of the cluster file), and none belongs to a single table. Values of
software and network are shared by all machines; values of matmuls by all machines of one generation of accelerators.
The fit uses all rows that can be judged; published/calibrated.json lists them. The weight of a table is the square root
of its number of rows, so that no large table dominates. The method is reweighted Gauss-Newton on the mean absolute
logarithm of predicted over published step time. Errors above e^0.5 count as e^0.5, so that wrong rows have no effect. A
penalty keeps values that few rows determine near their first guess: the squared distance in quarters of the range,
times `PRIOR`.

--cross prints the errors of rows that were not fitted: each table is judged by a fit on the other tables. `gangline
plan` prints the spread of these errors (accuracy.json of gangline-planner).

No other planner is compared on these rows. Calculon (Isaev et al., SC 2023, doi 10.1145/3581784.3607102) is in no
package index. A predictor from operators sampled on the machine reports mean errors of 4.98 % on A100 and 9.38 % on
GH200, for models up to 20B on up to 128 GPUs (Zhang et al., arXiv 2509.22832); its rows differ from these.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from math import exp, log, sqrt
from statistics import median

import numpy as np
from numpy.typing import NDArray

from gangline import UserError
from gangline.explain.explained import Explained
from gangline.explain.work import StageWork
from gangline_basics.cluster.file import SHIPPED, Cluster, Quantity, list_shipped, load_cluster
from gangline_planner import accuracy
from gangline_planner.price.step import Pieces, compute_step_time, estimate
from published import calibrated
from published.case import Case, case_of
from published.report import read_rows
from published.row import Row, Unjudged
from published.summary import Judged, Spread, slope, slope_interval

GENERATIONS = {"ampere": r"[av]100", "hopper": r"h[12]00|mi300x|v5p", "blackwell": r"g?b200", "ultra": r"g?b300"}
SOURCE = "fitted on published step times by benchmarks/planner_fit.py"
SHARED = {  # value -> (first guess, minimum, maximum)
    "ramp.seconds": (4e-6, 1e-6, 1e-5),  # matmul.half over the 16-bit peak
    "attention.half": (700.0, 100.0, 2000.0),
    "elementwise.passes": (2.0, 1.5, 3.0),
    "passes.ratio": (1.5, 1.0, 3.0),  # elementwise.passes_apart over elementwise.passes
    "module.seconds": (5e-5, 1e-5, 2e-4),
    "link.node.efficiency": (0.75, 0.68, 0.82),  # nccl-tests: 230 of 300 GB/s on A100, 360 of 450 on H100
    "link.cluster.efficiency": (0.75, 0.5, 0.92),
    "link.cluster.crowding": (0.03, 1e-3, 0.3),
    "overlap.share": (0.7, 0.3, 0.95),
    "link.node.latency": (8e-6, 2e-6, 1.5e-5),
    "link.cluster.latency": (1.5e-5, 5e-6, 6e-5),
    "host.seconds": (0.005, 1e-3, 0.01),
    "jitter.sigma": (0.004, 1e-3, 0.02),
    # the interquartile range of MLPerf's step times is 0.04 to 0.3 s (mlperf_step_jitter)
    "jitter.seconds": (0.02, 5e-4, 0.2),
}
EACH = {  # values of each generation
    "matmul.efficiency": (0.7, 0.4, 0.88),
    "matmul.efficiency_fp8": (0.6, 0.3, 0.85),
    "matmul.efficiency_fp4": (0.5, 0.2, 0.8),
    "attention.efficiency": (0.6, 0.3, 1.0),  # for matmuls alone, without exponentials
}
# generations without rows for their fused attention; their cluster files cite the publication of the kernel
MEASURED = {"ampere"}
BACKWARD = 0.85  # backward over forward throughput of attention (Dao, arXiv 2307.08691, figures 4 to 6)
# clock over the clock without a power limit: the cube root of the power ratio
LIMITED = {"h100_500w_ib": (500 / 700) ** (1 / 3)}

PRIOR = 0.002  # small: with ten times this, left-out tables have larger errors (median 7.3 % instead of 5.9 %)
MOST = 0.5  # maximum error that counts, as a logarithm
LEAST = 0.015  # error below which the weight of a row no longer grows
GAIN = 2e-5  # decrease of the loss at which the fit stops

Vector = NDArray[np.float64]
Fit = dict[tuple[str, str], float]  # (generation or "all", name of a value) -> value


@dataclass(frozen=True)
class Point:
    """A run with all rows that published it: the step time of each, and their median.

    stretch: makespan of the schedule over the compute time of the busiest rank; simulated once per round
    """

    table: str
    cluster: str
    explained: Explained
    each: tuple[float, ...]
    stretch: float

    @property
    def published(self) -> float:
        return median(self.each)


def generation(cluster: str) -> str:
    return next(name for name, pattern in GENERATIONS.items() if re.match(pattern, cluster))


def numbers(fit: Mapping[tuple[str, str], float], cluster: Cluster) -> dict[str, float]:
    """Return the values of a cluster's file from a fit."""
    own, limited = generation(cluster.name), LIMITED.get(cluster.name, 1.0)
    found = {name: fit["all", name] for name in SHARED}
    found |= {name: fit[own, name] * limited for name in EACH}
    found["elementwise.passes_apart"] = found.pop("passes.ratio") * found["elementwise.passes"]
    found["matmul.half"] = found.pop("ramp.seconds") * max(cluster["peak.bf16"], cluster.get("peak.fp16") or 0.0)
    found["attention.efficiency_backward"] = BACKWARD * found["attention.efficiency"]
    if own in MEASURED:
        del found["attention.efficiency"], found["attention.efficiency_backward"]
    for eight in ("fp8", "fp4"):
        if cluster.get(f"peak.{eight}") is None:
            del found[f"matmul.efficiency_{eight}"]
    return found


def fitted(fit: Fit, name: str) -> Cluster:
    cluster = load_cluster(name)
    return cluster.replace_numbers({key: Quantity(value, SOURCE) for key, value in numbers(fit, cluster).items()})


def errors(fit: Fit, points: list[Point]) -> list[float]:
    clusters = {name: fitted(fit, name) for name in {point.cluster for point in points}}
    return [log(estimate(p.explained, clusters[p.cluster], p.stretch) / p.published) for p in points]


def guess() -> Fit:
    fit = {("all", name): first for name, (first, _, _) in SHARED.items()}
    return fit | {(own, name): first for own in GENERATIONS for name, (first, _, _) in EACH.items()}


class Problem:
    """Rows and values as vectors; values are logarithms, in the order of `keys`."""

    def __init__(self, points: list[Point], keys: list[tuple[str, str]]) -> None:
        self.points, self.keys = points, keys
        sizes = Counter(point.table for point in points)
        weights = np.array([1 / sqrt(sizes[point.table]) for point in points])
        self.weights = weights / weights.sum()
        ranges = [{**SHARED, **EACH}[name] for _, name in keys]
        self.first, self.low, self.high = (np.log([one[index] for one in ranges]) for index in range(3))
        self.stiff = PRIOR / len(keys) / ((self.high - self.low) / 4) ** 2

    def fit(self, at: Vector) -> Fit:
        return dict(zip(self.keys, np.exp(at).tolist(), strict=True))

    def errors(self, at: Vector) -> Vector:
        return np.array(errors(self.fit(at), self.points))

    def loss(self, found: Vector, at: Vector) -> float:
        rows = self.weights @ np.minimum(np.abs(found), MOST)
        return float(rows + self.stiff @ (at - self.first) ** 2)

    def slopes(self, found: Vector, at: Vector, each: float = 0.02) -> Vector:
        """Return (rows, values): the change of each error per change of each value; backward differences at a bound."""
        columns = []
        for index in range(len(at)):
            step = each if at[index] + each <= self.high[index] else -each
            beside = at.copy()
            beside[index] += step
            columns.append((self.errors(beside) - found) / step)
        return np.stack(columns, axis=1)

    def step(self, found: Vector, slopes: Vector, at: Vector, damped: float) -> Vector:
        """Return the values after one step. Values at a bound that the step would cross stay there."""
        weights = self.weights / np.maximum(np.abs(found), LEAST) * (np.abs(found) < MOST)
        free = np.ones(len(at), bool)
        while True:
            some = slopes[:, free]
            curves = some.T @ (weights[:, None] * some) + 2 * np.diag(self.stiff[free])
            downhill = some.T @ (weights * found) + 2 * (self.stiff * (at - self.first))[free]
            step = np.zeros(len(at))
            step[free] = -np.linalg.solve(curves + damped * np.diag(np.diag(curves)), downhill)
            left = free & (((at <= self.low) & (step < 0)) | ((at >= self.high) & (step > 0)))
            if not left.any():
                return np.clip(at + step, self.low, self.high)
            free &= ~left


def descend(points: list[Point], rounds: int) -> tuple[Problem, Vector]:
    """Return the values with the least loss. The makespans are simulated again in each round."""
    begin = guess()
    problem = Problem(points, list(begin))
    at, damped = np.log(list(begin.values())), 1e-3
    for _ in range(rounds):
        problem.points = stretched(problem.points, problem.fit(at))
        found = problem.errors(at)
        slopes, best = problem.slopes(found, at), problem.loss(found, at)
        for _ in range(6):
            ahead = problem.step(found, slopes, at, damped)
            reached = problem.loss(problem.errors(ahead), ahead)
            if reached < best:
                break
            damped *= 5
        else:
            break
        at, damped = ahead, max(damped / 5, 1e-5)
        if best - reached < GAIN:
            break
    return problem, at


def stretched(points: list[Point], fit: Fit) -> list[Point]:
    """Return the points with makespans simulated with a fit."""
    clusters = {name: fitted(fit, name) for name in {point.cluster for point in points}}
    return [replace(one, stretch=stretch(one.explained, clusters[one.cluster])) for one in points]


def stretch(explained: Explained, cluster: Cluster) -> float:
    """Return the makespan of the schedule over the compute time of the busiest rank."""
    pieces = Pieces.of(explained, cluster)
    return compute_step_time(explained, cluster, pieces).timeline.makespan / pieces.compute_busiest_seconds(explained)


def as_written(value: float) -> str:
    return f"{value:.4g}"


def write(fit: Fit) -> None:
    """Write the values into the cluster files, in place. Machines without rows get the values of their generation."""
    for name in list_shipped():
        path = SHIPPED / f"{name}.yaml"
        text = path.read_text()
        source = "as fitted for H100, not measured on this machine" if name in ("mi300x_roce", "v5p") else SOURCE
        for key, value in numbers(fit, load_cluster(name)).items():
            line = f'  {key}: {{value: {as_written(value)}, source: "{source}"}}'
            text = re.sub(rf"^  {re.escape(key)}: .*$", line, text, flags=re.MULTILINE)
        path.write_text(text)


def points_of(cases: Iterable[Case]) -> list[Point]:
    """Return the runs; rows that published the same run become one point."""
    same: dict[object, list[Case]] = {}
    for case in cases:
        found = case.explained
        key = (
            case.row.get("table"),
            case.cluster.name,
            found.mesh,
            found.tokens,
            found.microbatches,
            found.matmul_format,
        )
        sent = tuple((sent.waits, sent.bytes) for sent in found.ranks[0].transfers)
        work = tuple((work.saved_bytes, work.modules) for work in found.work)
        same.setdefault((*key, found.parameters, found.kernels, sent, work), []).append(case)
    points = []
    for alike in same.values():
        explained, cluster = interned(alike[0].explained), alike[0].cluster
        each, table = tuple(case.seconds for case in alike), str(alike[0].row.get("table"))
        points.append(Point(table, cluster.name, explained, each, stretch(explained, cluster)))
    return points


def interned(explained: Explained) -> Explained:
    """Return the layout with equal stages as one object, so that the time of equal stages is computed once."""
    known: dict[object, StageWork] = {}

    def key(work: StageWork) -> object:
        matmuls = (tuple(sorted(of.items(), key=repr)) for of in (work.forward, work.weights, work.recompute))
        return (*matmuls, work.saved_bytes, work.resaved_bytes, work.modules, work.recomputed_modules)

    return replace(explained, work=tuple(known.setdefault(key(work), work) for work in explained.work))


def cases_of(path: str) -> Iterator[tuple[Row, Case]]:
    """Yield all rows of a file that can be judged."""
    for row in read_rows(path):
        try:
            yield row, case_of(row)
        except (Unjudged, UserError):
            continue


def cross(problem: Problem, at: Vector) -> list[Judged]:
    """Return every row, judged by a fit on the other tables.

    These fits are near the joint fit. So the errors of the fitted rows are approximated as linear in the logarithms of
    the values; the errors of the table left out are computed with the new fit.
    """
    found = problem.errors(at)
    slopes = problem.slopes(found, at)
    judged = []
    for left in sorted({point.table for point in problem.points}):
        rest = np.array([point.table != left for point in problem.points])
        others = Problem([point for point in problem.points if point.table != left], problem.keys)
        there, errors_there = at, found[rest]
        for _ in range(30):
            ahead = others.step(errors_there, slopes[rest], there, 0.05)
            errors_there = errors_there + slopes[rest] @ (ahead - there)
            there = ahead
        points = [point for point in problem.points if point.table == left]
        own = []
        for point, error in zip(points, errors(problem.fit(there), points), strict=True):
            predicted = point.published * exp(error)
            own += [
                Judged(left, left, point.explained.mesh.world, seconds, predicted, None, None, False)
                for seconds in point.each
            ]
        print(f"fitted without {left:26} {Spread.of([one.error for one in own])}", flush=True)
        judged += own
    return judged


def elsewhere(judged: list[Judged]) -> dict[str, float]:
    """Return the spread of the errors, and their drift with the number of GPUs."""
    low, high = slope_interval(judged)
    drift = {"slope": slope(judged), "slope_low": low, "slope_high": high}
    found = asdict(Spread.of([one.error for one in judged])) | {"tables": len({one.table for one in judged})} | drift
    return {name: round(value, 4) for name, value in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--rounds", type=int, default=12, help="maximum number of rounds")
    parser.add_argument("--cross", action="store_true", help="also judge each table by a fit on the other tables")
    asked = parser.parse_args()
    cases = list(cases_of(asked.rows))
    problem, at = descend(points_of(case for _, case in cases), asked.rounds)
    fit = problem.fit(at)
    rows = {str(row.get("id")): calibrated.identity(row) for row, _ in cases}
    calibrated.FILE.write_text(json.dumps(rows, indent=1) + "\n")
    if asked.cross:
        found = elsewhere(cross(problem, at))
        print(found)
        accuracy.FILE.write_text(json.dumps(found, indent=1) + "\n")
    write(fit)
    for (own, name), value in fit.items():
        print(f"{own:10} {name:24} {value:.4g}")
    print(Spread.of([exp(error) - 1 for error in problem.errors(at)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
