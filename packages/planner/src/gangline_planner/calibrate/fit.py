"""From measured seconds to the numbers of a cluster file, each with a floor below which no machine is.

Products, attention, copies and collectives are measured apart. What a step of a small model takes beyond these is what
moves memory between products (`elementwise.passes`) and, where the host itself computes, what starting all that hangs
by a product takes (`matmul.half`): both by the very sums that a plan is made of.
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
from gangline.model.products import AttentionProduct, MatrixProduct
from gangline_basics.cluster.file import Cluster, Quantity
from gangline_planner.calibrate.lines import two_costs
from gangline_planner.calibrate.links import CollectiveCall
from gangline_planner.calibrate.small_steps import MICROBATCHES, STARTS, SmallModel, run_of
from gangline_planner.price.products import BACKWARD, Rates
from gangline_planner.price.step import StageTime

START = 1e-6  # seconds that no product takes less to start
LATENCY = 1e-6  # and no message
PASSES = 1.0  # what is kept is written once
SMALLEST = 0.1  # of what a measurement took: the least that is taken for what it was to measure

Numbers = dict[str, float]
K = TypeVar("K")


@dataclass
class Measured:
    """Seconds of one call, ranks on the average. Of several rounds each number is the middle one.

    copied    bytes a second
    products  by dtype
    forward, backward  of attention
    steps     forward and backward of all microbatches; updates: what follows them; starts: passes of the smallest model
    alone     how much longer a step takes while all ranks take one
    late      how much later the last rank ends its computation than all do on the average, of what it takes
    hidden    the share of a transfer that computation hides
    """

    copied: float = 0.0
    products: dict[str, Mapping[MatrixProduct, float]] = field(default_factory=dict)
    forward: Mapping[AttentionProduct, float] = field(default_factory=dict)
    backward: Mapping[AttentionProduct, float] = field(default_factory=dict)
    steps: Mapping[SmallModel, float] = field(default_factory=dict)
    starts: float = 0.0
    update: float = 0.0
    alone: float = 1.0
    late: float = 0.0
    sent: Mapping[CollectiveCall, float] = field(default_factory=dict)
    hidden: float = 0.0


def middle(rounds: Sequence[Measured]) -> Measured:
    """So that a moment in which the machine did something else counts in none."""
    one = rounds[0]
    return Measured(
        copied=median(each.copied for each in rounds),
        products={name: _middle([each.products[name] for each in rounds]) for name in one.products},
        forward=_middle([each.forward for each in rounds]),
        backward=_middle([each.backward for each in rounds]),
        steps=_middle([each.steps for each in rounds]),
        starts=median(each.starts for each in rounds),
        update=median(each.update for each in rounds),
        alone=median(each.alone for each in rounds),
        late=median(each.late for each in rounds),
        sent=_middle([each.sent for each in rounds]),
        hidden=median(each.hidden for each in rounds),
    )


def _middle(rounds: Sequence[Mapping[K, float]]) -> dict[K, float]:
    return {key: median(each[key] for each in rounds) for key in rounds[0]}


def numbers(measured: Measured, ranks: int, device: str) -> Numbers:
    """Names of a cluster file's numbers."""
    found: Numbers = {"memory.bandwidth": measured.copied}
    for name, seconds in measured.products.items():
        each, start = rate(seconds, measured.copied, 4 if name == "fp32" else 2)
        found[f"peak.{name}"] = 1 / each
        if name == ("fp32" if device == "cpu" else "bf16"):
            found["matmul.half"] = max(start, START) / each
    found |= attention(measured, found["peak.fp32" if device == "cpu" else "peak.bf16"])
    found["module.seconds"] = measured.starts / (3 * MICROBATCHES * count_work(STARTS, device).modules)
    found["host.seconds"] = measured.update
    found |= steps(measured.steps, found, device)
    if device == "cpu":  # an accelerator is shared with nobody: what is above 1 there is noise
        found["node.alone"] = max(1.0, measured.alone)
    if ranks > 1:
        found |= links(measured.sent)
        found["overlap.share"] = measured.hidden
        found["jitter.sigma"] = max(0.0, measured.late) / sqrt(2 * log(ranks))
    return found


def rate(seconds: Mapping[MatrixProduct, float], memory: float, itemsize: int) -> tuple[float, float]:
    """(seconds of an operation, seconds at the start), what crosses memory left out, as a plan adds it."""
    points = []
    for shape, taken in seconds.items():
        moved = (shape.rows * (shape.inner + shape.columns) + shape.inner * shape.columns) * itemsize
        points.append((float(shape.flops), 1.0, taken - moved / memory, taken))
    each, start = two_costs(points)
    most = max(points)
    return max(each, SMALLEST * most[3] / most[0]), start


def attention(measured: Measured, peak: float) -> Numbers:
    """Rates over the peak, and the keys over which they reach half of it."""
    points = []
    for shape, taken in measured.forward.items():
        flops = shape.flops * shape.visible
        points.append((flops, flops / shape.keys, taken, taken))
    each, short = two_costs(points)
    most = max(points)
    each = max(each, SMALLEST * most[2] / most[0])
    half = max(1.0, short / each)
    behind = median(
        taken / (BACKWARD * shape.flops * shape.visible * (1 + half / shape.keys))
        for shape, taken in measured.backward.items()
    )
    return {
        "attention.efficiency": 1 / each / peak,
        "attention.efficiency_backward": 1 / behind / peak,
        "attention.half": half,
    }


def steps(seconds: Mapping[SmallModel, float], known: Numbers, device: str) -> Numbers:
    """`elementwise.passes`, and on a CPU `matmul.half`: planned seconds are a sum of both and of what is known."""
    half = known["matmul.half"]

    def predict_step(model: SmallModel, half: float, passes: float) -> float:
        given = {**known, "matmul.half": half, "elementwise.passes": passes, "elementwise.passes_apart": passes}
        return MICROBATCHES * stage_time(model, device, {**given, "module.seconds": 0.0}).all

    points = []
    for model, taken in seconds.items():
        start = half if device != "cpu" else 0.0
        least = predict_step(model, start, 0.0)
        moved = predict_step(model, start, 1.0) - least
        started = predict_step(model, 1e6, 0.0) - least if device == "cpu" else 0.0
        points.append((moved, started, taken - least, taken))
    passes, starts = two_costs(points)
    passes = max(PASSES, passes)
    if device == "cpu":
        half = max(START * known["peak.fp32"], starts * 1e6)
    return {"matmul.half": half, "elementwise.passes": passes, "elementwise.passes_apart": passes}


def links(seconds: Mapping[CollectiveCall, float]) -> Numbers:
    """One latency for a round and one bandwidth, over all operations and numbers of ranks."""
    points = [(float(sent.rounds), sent.bytes, taken, taken) for sent, taken in seconds.items()]
    latency, each = two_costs(points)
    most = max(points, key=lambda point: point[1])
    return {
        "link.node.latency": max(latency, LATENCY),
        "link.node.bandwidth": 1 / max(each, SMALLEST * most[2] / most[1]),
    }


def count_work(model: SmallModel, device: str) -> StageWork:
    """Of one microbatch."""
    run = run_of(model, device)
    found = run.parallel.explain(run, Mesh.of({}), compose_model(run))
    assert found is not None, "parallel=single explains itself"
    return found.work[0]


def stage_time(model: SmallModel, device: str, known: Numbers) -> StageTime:
    """Of one microbatch, with these numbers."""
    given = {**known, "matmul.efficiency": 1.0, "memory.efficiency": 1.0}
    cluster = Cluster("measured", "", Topology(), {name: Quantity(value, "measured") for name, value in given.items()})
    rates = Rates.of(cluster, "fp32" if device == "cpu" else "bf16")
    return StageTime.of(count_work(model, device), cluster, rates)
