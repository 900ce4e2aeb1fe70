"""Fits the numbers of the shipped cluster files that no datasheet has on published step times, and writes them.

    python benchmarks/planner_fit.py published.json [--seconds 300] [--cross]

Few numbers, each with a meaning (`gangline.cluster.file.NUMBERS`), none of them of a table: those of software and
network are one for all machines, those of products one for each generation of accelerators. Rows are those of the
tables in judge/calibrated.json; every table weighs as the root of its rows, so that no large one drowns the others.
Coordinate descent on the mean absolute logarithm of predicted over published, where an error above e^0.5 counts as
that: a row that is not what it seems must not pull.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import exp, log, sqrt
from statistics import median

from gangline.cluster import Cluster, Quantity, load_cluster, shipped
from gangline.cluster.file import SHIPPED
from gangline.explain import Explained, StageWork
from gangline_planner.judge.calibrated import calibrated_tables
from gangline_planner.judge.report import rows_of
from gangline_planner.judge.rows import Judgeable, Unjudged, judgeable
from gangline_planner.judge.summary import Spread
from gangline_planner.price.step import Pieces, estimate, step_time

GENERATIONS = {"ampere": r"[av]100", "hopper": r"h[12]00|mi300x|v5p", "blackwell": r"b[23]00", "grace": r"gb[23]00"}
SOURCE = "fitted on published step times by benchmarks/planner_fit.py"
SHARED = {  # number -> (first guess, least, most)
    "ramp.seconds": (4e-6, 1e-6, 1e-5),  # matmul.half over the 16-bit peak
    "attention.half": (700.0, 100.0, 2000.0),
    "elementwise.passes": (2.0, 1.5, 3.0),
    "passes.ratio": (1.5, 1.0, 3.0),  # elementwise.passes_apart over it
    "module.seconds": (5e-5, 1e-5, 2e-4),
    "link.node.efficiency": (0.75, 0.68, 0.82),  # nccl-tests: 230 of 300 GB/s on A100, 360 of 450 on H100
    "link.cluster.efficiency": (0.75, 0.5, 0.92),
    "overlap.share": (0.7, 0.3, 0.95),
    "link.node.latency": (1e-5, 5e-6, 1.5e-5),
    "link.cluster.latency": (1.5e-5, 5e-6, 6e-5),
    "host.seconds": (0.005, 1e-3, 0.01),
    "jitter.sigma": (0.004, 0.001, 0.02),
}
EACH = {  # of each generation
    "matmul.efficiency": (0.7, 0.4, 0.88),
    "matmul.efficiency_fp8": (0.6, 0.3, 0.85),
    "matmul.efficiency_fp4": (0.5, 0.2, 0.8),
    "attention.efficiency": (0.45, 0.2, 0.75),
}
MEASURED = {"ampere"}  # generations whose fused attention no row shows: their files quote its own publication
BACKWARD = 0.85  # of attention's forward rate (Dao, arXiv 2307.08691, figures 4 to 6)
LIMITED = {"h100_500w_ib": (500 / 700) ** (1 / 3)}  # clocks go with the cube root of power

Fit = dict[tuple[str, str], float]  # (generation or "all", number) -> value


@dataclass(frozen=True)
class Point:
    """A row. stretch: the makespan of its schedule over the time in which the busiest rank computes, simulated once."""

    table: str
    cluster: str
    explained: Explained
    published: float
    stretch: float


def generation(cluster: str) -> str:
    return next(name for name, pattern in GENERATIONS.items() if re.match(pattern, cluster))


def numbers(fit: Mapping[tuple[str, str], float], cluster: Cluster) -> dict[str, float]:
    """What the file of a cluster says under a fit."""
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
    return cluster.with_numbers({key: Quantity(value, SOURCE) for key, value in numbers(fit, cluster).items()})


def errors(fit: Fit, points: list[Point]) -> list[float]:
    clusters = {name: fitted(fit, name) for name in {point.cluster for point in points}}
    return [log(estimate(p.explained, clusters[p.cluster], p.stretch) / p.published) for p in points]


def loss(fit: Fit, points: list[Point], weights: list[float]) -> float:
    found = errors(fit, points)
    return sum(w * min(abs(error), 0.5) for w, error in zip(weights, found, strict=True)) / sum(weights)


def descend(points: list[Point], seconds: float, start: Fit | None = None) -> Fit:
    fit = {("all", name): guess for name, (guess, _, _) in SHARED.items()}
    fit |= {(own, name): guess for own in GENERATIONS for name, (guess, _, _) in EACH.items()}
    for key, value in (start or {}).items():
        _, least, most = {**SHARED, **EACH}[key[1]]
        fit[key] = min(max(value, least), most)
    sizes = Counter(point.table for point in points)
    weights = [1 / sqrt(sizes[point.table]) for point in points]
    best, steps, end = loss(fit, points, weights), dict.fromkeys(fit, 0.3), time.monotonic() + seconds
    while max(steps.values()) > 0.02 and time.monotonic() < end:
        for key in fit:
            _, least, most = {**SHARED, **EACH}[key[1]]
            for sign in (1, -1):
                other = {**fit, key: min(max(fit[key] * exp(sign * steps[key]), least), most)}
                found = loss(other, points, weights)
                if found < best - 1e-6:
                    best, fit = found, other
                    steps[key] *= 1.2
                    break
            else:
                steps[key] *= 0.5
    return fit


def as_written(value: float) -> str:
    return f"{value:.4g}"


def write(fit: Fit) -> None:
    """Into the files, in place; of machines that no row is of, those of the generation that they are taken for."""
    for name in shipped():
        path = SHIPPED / f"{name}.yaml"
        text = path.read_text()
        source = "as fitted for H100, not measured on this machine" if name in ("mi300x_roce", "v5p") else SOURCE
        for key, value in numbers(fit, load_cluster(name)).items():
            line = f'  {key}: {{value: {as_written(value)}, source: "{source}"}}'
            text = re.sub(rf"^  {re.escape(key)}: .*$", line, text, flags=re.MULTILINE)
        path.write_text(text)


def points_of(cases: Iterable[Judgeable]) -> list[Point]:
    """Rows that are the same run, published more than once, are one, with the median of what they say."""
    same: dict[object, list[Judgeable]] = {}
    for case in cases:
        found = case.explained
        key = (case.row.get("table"), case.cluster.name, found.mesh, found.tokens, found.microbatches, found.products)
        waits = tuple(sent.waits for sent in found.ranks[0].transfers)
        same.setdefault((*key, found.parameters, len(found.work), waits), []).append(case)
    points = []
    for alike in same.values():
        explained, cluster = interned(alike[0].explained), alike[0].cluster
        makespan = step_time(explained, cluster).timeline.makespan
        stretch = makespan / Pieces.of(explained, cluster).busiest(explained)
        seconds = median(case.seconds for case in alike)
        points.append(Point(str(alike[0].row["table"]), cluster.name, explained, seconds, stretch))
    return points


def interned(explained: Explained) -> Explained:
    """With stages that compute the same as one object, whose time is worked out once."""
    known: dict[object, StageWork] = {}

    def key(work: StageWork) -> object:
        products = (tuple(sorted(of.items(), key=repr)) for of in (work.forward, work.weights, work.again))
        return (*products, work.kept, work.kept_again, work.modules, work.modules_again)

    return replace(explained, work=tuple(known.setdefault(key(work), work) for work in explained.work))


def cases_of(path: str, tables: Collection[str]) -> Iterator[Judgeable]:
    for row in rows_of(path):
        if row.get("table") in tables:
            try:
                yield judgeable(row)
            except Unjudged:
                continue


def cross(points: list[Point], seconds: float, start: Fit) -> None:
    """Each table judged by a fit on the others."""
    for left in sorted({point.table for point in points}):
        fit = descend([point for point in points if point.table != left], seconds, start)
        found = errors(fit, [point for point in points if point.table == left])
        print(f"fitted without {left:26} {Spread.of([exp(error) - 1 for error in found])}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--cross", action="store_true", help="judge each table by a fit on the others; write nothing")
    asked = parser.parse_args()
    points = points_of(cases_of(asked.rows, calibrated_tables()))
    fit = descend(points, asked.seconds)
    if asked.cross:
        cross(points, asked.seconds / 4, fit)
        return 0
    write(fit)
    for (own, name), value in fit.items():
        print(f"{own:10} {name:24} {value:.4g}")
    print(Spread.of([exp(error) - 1 for error in errors(fit, points)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
