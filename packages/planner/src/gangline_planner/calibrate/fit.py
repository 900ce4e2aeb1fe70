"""Fit of the numbers of a cluster file to measured seconds; each number has a minimum that no machine undercuts.

Matmuls, attention, copies and collectives are measured separately. The remaining time of a small model's step is memory
traffic between matmuls (`elementwise.passes`) and, on a CPU, a fixed overhead per matmul (`matmul.half`). Both are
fitted with the formulas that a plan uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import log, sqrt
from statistics import median
from typing import TypeVar

from gangline.explain.topology import Topology
from gangline.explain.work import StageWork
from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.model.matmuls import AttentionMatmuls, Matmul
from gangline_basics.cluster.file import Cluster, Quantity
from gangline_planner.calibrate.lines import fit_two_costs
from gangline_planner.calibrate.links import CollectiveCall
from gangline_planner.calibrate.small_steps import MICROBATCHES, STARTS, SmallModel, build_run
from gangline_planner.price.matmuls import BACKWARD, Rates
from gangline_planner.price.step import StageTime

START = 1e-6  # minimum start time of a matmul, in seconds
LATENCY = 1e-6  # minimum latency of a message, in seconds
PASSES = 1.0  # minimum of `elementwise.passes`: saved activations are written once
SMALLEST = 0.1  # minimum of a fitted term, as a share of the measured seconds

Numbers = dict[str, float]
K = TypeVar("K")


@dataclass
class Measured:
    """Measurements of one round, or medians over rounds. Times are seconds of one call, mean over ranks.

    copied    bandwidth of a memory copy, in bytes per second
    matmuls  time of a matmul, by dtype and shape
    forward, backward  time of the forward and the backward pass of attention, by shape
    steps     time of forward and backward of all microbatches, by model; starts: the same for the smallest model
    update    time of gradient clipping and the optimizer
    alone     time of a step while all ranks compute, as a multiple of its time while only one rank computes
    late      time by which the slowest rank exceeds the mean over ranks, as a share of the mean
    sent      time of a collective, by its call
    hidden    share of a transfer that computation hides
    """

    copied: float = 0.0
    matmuls: dict[str, Mapping[Matmul, float]] = field(default_factory=dict)
    forward: Mapping[AttentionMatmuls, float] = field(default_factory=dict)
    backward: Mapping[AttentionMatmuls, float] = field(default_factory=dict)
    steps: Mapping[SmallModel, float] = field(default_factory=dict)
    starts: float = 0.0
    update: float = 0.0
    alone: float = 1.0
    late: float = 0.0
    sent: Mapping[CollectiveCall, float] = field(default_factory=dict)
    hidden: float = 0.0


def merge_rounds(rounds: Sequence[Measured]) -> Measured:
    """Return the median of each measurement over rounds, so that other load during one round has no effect."""
    one = rounds[0]
    return Measured(
        copied=median(each.copied for each in rounds),
        matmuls={name: _compute_medians([each.matmuls[name] for each in rounds]) for name in one.matmuls},
        forward=_compute_medians([each.forward for each in rounds]),
        backward=_compute_medians([each.backward for each in rounds]),
        steps=_compute_medians([each.steps for each in rounds]),
        starts=median(each.starts for each in rounds),
        update=median(each.update for each in rounds),
        alone=median(each.alone for each in rounds),
        late=median(each.late for each in rounds),
        sent=_compute_medians([each.sent for each in rounds]),
        hidden=median(each.hidden for each in rounds),
    )


def _compute_medians(rounds: Sequence[Mapping[K, float]]) -> dict[K, float]:
    return {key: median(each[key] for each in rounds) for key in rounds[0]}


def fit_numbers(measured: Measured, ranks: int, device: str) -> Numbers:
    """Return the fitted numbers of a cluster file, by name."""
    numbers: Numbers = {"memory.bandwidth": measured.copied}
    for name, seconds in measured.matmuls.items():
        each, start = fit_rate(seconds, measured.copied, 4 if name == "fp32" else 2)
        numbers[f"peak.{name}"] = 1 / each
        if name == ("fp32" if device == "cpu" else "bf16"):
            numbers["matmul.half"] = max(start, START) / each
    numbers |= fit_attention(measured, numbers["peak.fp32" if device == "cpu" else "peak.bf16"])
    numbers["module.seconds"] = measured.starts / (3 * MICROBATCHES * count_work(STARTS, device).modules)
    numbers["host.seconds"] = measured.update
    numbers |= fit_steps(measured.steps, numbers, device)
    if device == "cpu":  # only CPU ranks share cores; on an accelerator, a value above 1 is noise
        numbers["node.alone"] = max(1.0, measured.alone)
    if ranks > 1:
        numbers |= fit_links(measured.sent)
        numbers["overlap.share"] = measured.hidden
        numbers["jitter.sigma"] = max(0.0, measured.late) / sqrt(2 * log(ranks))
    return numbers


def fit_rate(seconds: Mapping[Matmul, float], memory: float, itemsize: int) -> tuple[float, float]:
    """Return (seconds per operation, fixed seconds per matmul), without memory traffic, which a plan adds."""
    points = []
    for shape, duration in seconds.items():
        traffic = (shape.rows * (shape.inner + shape.columns) + shape.inner * shape.columns) * itemsize
        points.append((float(shape.flops), 1.0, duration - traffic / memory, duration))
    each, start = fit_two_costs(points)
    most = max(points)
    return max(each, SMALLEST * most[3] / most[0]), start


def fit_attention(measured: Measured, peak: float) -> Numbers:
    """Return the efficiencies of attention (rate over `peak`), and the number of keys at which it has half its rate."""
    points = []
    for shape, duration in measured.forward.items():
        flops = shape.flops * shape.visible
        points.append((flops, flops / shape.keys, duration, duration))
    each, short = fit_two_costs(points)
    most = max(points)
    each = max(each, SMALLEST * most[2] / most[0])
    half = max(1.0, short / each)
    behind = median(
        duration / (BACKWARD * shape.flops * shape.visible * (1 + half / shape.keys))
        for shape, duration in measured.backward.items()
    )
    return {
        "attention.efficiency": 1 / each / peak,
        "attention.efficiency_backward": 1 / behind / peak,
        "attention.half": half,
    }


def fit_steps(seconds: Mapping[SmallModel, float], known: Numbers, device: str) -> Numbers:
    """Return `elementwise.passes` and `matmul.half` (refitted on a CPU), fitted to step times minus the known terms."""
    half = known["matmul.half"]

    def predict_step(model: SmallModel, half: float, passes: float) -> float:
        numbers = {**known, "matmul.half": half, "elementwise.passes": passes, "elementwise.passes_apart": passes}
        return MICROBATCHES * compute_stage_time(model, device, {**numbers, "module.seconds": 0.0}).all

    points = []
    for model, duration in seconds.items():
        start = half if device != "cpu" else 0.0
        least = predict_step(model, start, 0.0)
        pass_seconds = predict_step(model, start, 1.0) - least
        started = predict_step(model, 1e6, 0.0) - least if device == "cpu" else 0.0
        points.append((pass_seconds, started, duration - least, duration))
    passes, starts = fit_two_costs(points)
    passes = max(PASSES, passes)
    if device == "cpu":
        half = max(START * known["peak.fp32"], starts * 1e6)
    return {"matmul.half": half, "elementwise.passes": passes, "elementwise.passes_apart": passes}


def fit_links(seconds: Mapping[CollectiveCall, float]) -> Numbers:
    """Return latency per message and bandwidth of links, fitted over all collectives and numbers of ranks."""
    points = [(float(call.rounds), call.bytes, duration, duration) for call, duration in seconds.items()]
    latency, each = fit_two_costs(points)
    most = max(points, key=lambda point: point[1])
    return {
        "link.node.latency": max(latency, LATENCY),
        "link.node.bandwidth": 1 / max(each, SMALLEST * most[2] / most[1]),
    }


def count_work(model: SmallModel, device: str) -> StageWork:
    """Return the work of one microbatch of a small model."""
    run = build_run(model, device)
    explanation = run.parallel.explain(run, Mesh.of({}), compose_model(run))
    assert explanation is not None, "parallel=single implements explain"
    return explanation.work[0]


def compute_stage_time(model: SmallModel, device: str, known: Numbers) -> StageTime:
    """Return the predicted seconds of one microbatch of a small model, with the numbers `known`."""
    numbers = {**known, "matmul.efficiency": 1.0, "memory.efficiency": 1.0}
    cluster = Cluster(
        "measured", "", Topology(), {name: Quantity(value, "measured") for name, value in numbers.items()}
    )
    rates = Rates.of(cluster, "fp32" if device == "cpu" else "bf16")
    return StageTime.of(count_work(model, device), cluster, rates)
