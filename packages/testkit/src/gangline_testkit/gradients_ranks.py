"""Functions that ranks run for `GradientsSuite`: sums of synthetic buckets, and training."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline.config.schema import Run
from gangline.gradients import Bucket, BucketLayout, GradientReduction, GradientSlot
from gangline.mesh import Mesh
from gangline.plugin.registry import load
from gangline.record import StepRecord
from gangline.train.rank import train
from gangline_basics.parallel.reduction_state import ReductionState
from gangline_testkit import rank
from gangline_testkit.compare import Held
from gangline_testkit.sessions import open_session
from gangline_testkit.traffic_ranks import CountingComm

# buckets with matrices, vectors, padding and a part of a row; sizes are multiples of 4
BUCKETS = (
    BucketLayout(
        540,
        (
            GradientSlot("blocks.0.up.weight", 0, (24, 16)),
            GradientSlot("blocks.0.norm.weight", 384, (8,)),
            GradientSlot("blocks.0.down.weight", 400, (14, 10)),
        ),
        1,
    ),
    BucketLayout(96, (GradientSlot("embed.weight", 0, (7,)), GradientSlot("embed.weight", 7, (8, 11))), 1),
)

# The bucket of `count_bytes`, so large that padding is negligible.
LARGE = BucketLayout(256 * 512, (GradientSlot("blocks.0.up.weight", 0, (256, 512)),), 1)
LATE = 1_000_000  # number of a step after any warm-up


@dataclass(frozen=True)
class Sums:
    """Inputs of repeated sums of the synthetic buckets.

    steps     number of sums of each bucket
    scatters  sum by `reduce_scatter`, else by `reduce`
    constant  whether a rank has equal gradients in all steps
    late      whether the sums of all buckets of a step start before the first wait
    handover  step before which the reduction is rebuilt from its state arrays; 0: no rebuild

    `spoilt`: value of the last gradient of each bucket on rank 0, inf or nan; None: unchanged.
    """

    build: str
    run: Run
    steps: int
    dtype: torch.dtype = torch.float32
    scatters: bool = False
    constant: bool = False
    late: bool = True
    handover: int = 0
    spoilt: float | None = None


def make_gradient(layout: BucketLayout, number: int, step: int, index: int, dtype: torch.dtype) -> Tensor:
    """Return the flat gradients of the rank `index` in bucket `number`, with zeros between slots."""
    generator = torch.Generator().manual_seed(1 + index + 100 * number + 10_000 * step)
    flat = torch.zeros(layout.size, dtype=dtype)
    for slot in layout.slots:
        at = slice(slot.offset, slot.offset + slot.size)
        flat[at] = torch.randn(slot.size, generator=generator, dtype=torch.float64).to(dtype) * 10.0**-number
    return flat


def compute_exact(layout: BucketLayout, number: int, step: int, ranks: int) -> Tensor:
    """Return the sum of the gradients of all ranks in float64."""
    return torch.stack([make_gradient(layout, number, step, index, torch.float64) for index in range(ranks)]).sum(0)


def make_layouts(ranks: int, scatters: bool) -> list[BucketLayout]:
    return [replace(bucket, ranks=ranks, scatters=scatters) for bucket in BUCKETS]


def build_reduction(sums: Sums) -> GradientReduction:
    reduction: GradientReduction = load(sums.build)(sums.run.gradients, sums.run)
    return reduction


def make_fresh(sums: Sums, reduction: GradientReduction, comm: Comm) -> list[Mapping[str, Tensor]]:
    like = torch.empty(0, dtype=sums.dtype)
    return [ReductionState(reduction, [own], own, like).views for own in make_layouts(comm.size, sums.scatters)]


@torch.no_grad()
def sum_buckets(sums: Sums) -> list[list[Tensor]]:
    """Return the sums on this rank as [step][bucket]."""
    comm = rank.make_comms(Mesh.of({"dp_replicate": rank.world}), False).get_comm("dp_replicate")
    reduction = build_reduction(sums)
    views, totals = make_fresh(sums, reduction, comm), []
    for step in range(sums.steps):
        if step and step == sums.handover:
            before, reduction = views, build_reduction(sums)
            views = make_fresh(sums, reduction, comm)
            for arrays, targets in zip(before, views, strict=True):
                for name, array in arrays.items():
                    targets[name].copy_(array)
        totals.append([total.clone() for total in _run_step(sums, reduction, comm, views, step)])
    return totals


def _run_step(
    sums: Sums, reduction: GradientReduction, comm: Comm, states: Sequence[Mapping[str, Tensor]], step: int
) -> Iterator[Tensor]:
    pending: list[Pending[Tensor]] = []
    for number, layout in enumerate(make_layouts(comm.size, sums.scatters)):
        flat = make_gradient(layout, number, 0 if sums.constant else step, comm.index, sums.dtype)
        if sums.spoilt is not None and comm.index == 0:
            flat[layout.slots[-1].offset + layout.slots[-1].size - 1] = sums.spoilt
        start = reduction.reduce_scatter if sums.scatters else reduction.reduce
        pending.append(start(Bucket(layout, flat, states[number], step), comm))
        if not sums.late:
            yield pending.pop().wait()
    for one in pending:
        yield one.wait()


@torch.no_grad()
def count_bytes(sums: Sums) -> tuple[int, int]:
    """Sum the large bucket in float32 after any warm-up, and return (bytes sent, numbers stored) of this rank."""
    traffic: Counter[str] = Counter()
    comm = CountingComm(rank.make_comms(Mesh.of({"dp_replicate": rank.world}), False).get_comm("dp_replicate"), traffic)
    reduction, layout = build_reduction(sums), replace(LARGE, ranks=comm.size, scatters=sums.scatters)
    views = ReductionState(reduction, [layout], layout, torch.empty(0)).views
    bucket = Bucket(layout, make_gradient(layout, 0, 0, comm.index, torch.float32), views, LATE)
    (reduction.reduce_scatter if sums.scatters else reduction.reduce)(bucket, comm).wait()
    return traffic.total(), sum(array.numel() for array in views.values())


def describe_arrays(sums: Sums, ranks: int) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the state arrays of every bucket: two calls of one reduction, then one call of another."""
    first, other = build_reduction(sums), build_reduction(sums)
    return [
        {name: tuple(shape) for name, shape in reduction.get_array_shapes(layout).items()}
        for reduction in (first, first, other)
        for layout in make_layouts(ranks, sums.scatters)
    ]


def run_training(run_dir: Path, *settings: str) -> tuple[list[StepRecord], list[Held], list[str]]:
    """Train or resume on this rank, and return (records, weights, names of layout-dependent arrays)."""
    s, records = open_session(run_dir, *settings), list[StepRecord]()
    tell = s.reporter.record
    s.reporter.record = lambda record: records.append(record) or tell(record)  # type: ignore[method-assign, func-returns-value]
    train(s)
    weights = [(shard.name, shard.offset, shard.local.detach().clone()) for shard in s.runtime.shards()]
    return records, weights, [name for name in s.registry if name.startswith("local/")]
