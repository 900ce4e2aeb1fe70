"""The run's gradient reduction (`gangline.gradients`), which replaces the collectives of a `GradReducer`.

A buffer is a bucket: the gradients of all its arrays are summed in one call. With replicas, whose links are slow, the
reduction sums each range over its replicas; without replicas it sums the full buffer over the shard ranks. Every rank
can compute the buckets of every buffer of the run, and the arrays that their reductions keep between steps (error
feedback, for example).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction
from gangline.comm.wrap import Wrapped
from gangline.gradients import Bucket, BucketLayout, GradientReduction, GradientSlot
from gangline.mesh import Mesh
from gangline.plan import Plan
from gangline.shard import Layout, Registry, Shard
from gangline_basics.parallel.reduction_state import ReductionState, iterate_layouts, iterate_shards
from gangline_parallel_megatron_style.data_parallel.grad_reducer import GradReducer
from gangline_parallel_megatron_style.data_parallel.param_buffer import ParamBuffer
from gangline_parallel_megatron_style.sharding.arrays import ModelLayout
from gangline_parallel_megatron_style.sharding.packing import Packing
from gangline_parallel_megatron_style.sharding.ranks import StateRanks


@dataclass
class StepClock:
    """Number of the current step, shared by all buffers of a rank."""

    step: int = 0


class ReducedComm(Wrapped):
    """A communicator that sums one bucket by the run's gradient reduction and forwards all other calls."""

    def __init__(
        self, inner: Comm, reduction: GradientReduction, own: BucketLayout, state: ReductionState, clock: StepClock
    ):
        super().__init__(inner)
        self.reduction, self.layout, self.state, self.clock = reduction, own, state, clock
        self._last = (-1, 0)  # (step of the latest sum of the bucket, number of earlier sums in that step)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return self.reduction.reduce_scatter(self._make_bucket(x), self.inner)

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        if op != "sum" or not self.layout.slots:  # a range may hold only padding, which needs no reduction
            return self.inner._all_reduce(x, op, background)
        return self.reduction.reduce(self._make_bucket(x), self.inner)

    def _make_bucket(self, x: Tensor) -> Bucket:
        step, earlier_sums = self._last
        self._last = (self.clock.step, earlier_sums + 1 if step == self.clock.step else 0)
        return Bucket(self.layout, x, self.state.views, *self._last)


def add_reduction(
    reducer: GradReducer, packing: Packing, reduction: GradientReduction, clock: StepClock, like: Tensor
) -> GradReducer:
    """Return a buffer's reducer that uses `reduction` between replicas, or without replicas between shard ranks."""
    n, R = reducer.shard.size, reducer.replicas.size
    if n * R == 1:
        return reducer
    buckets = make_bucket_layouts(packing, n, R, reducer.cut)
    own = buckets[reducer.shard.index if len(buckets) > 1 else 0]
    state = ReductionState(reduction, buckets, own, like)
    if R > 1:
        return replace(reducer, replicas=ReducedComm(reducer.replicas, reduction, own, state, clock), joint=None)
    return replace(reducer, shard=ReducedComm(reducer.shard, reduction, own, state, clock), joint=None)


def make_bucket_layouts(packing: Packing, n: int, R: int, cut: bool) -> list[BucketLayout]:
    """Return the layouts of the buckets in which n shard ranks and R replicas sum a buffer.

    With replicas there is one bucket for each of the n ranges; without replicas one bucket for the complete buffer.
    cut: whether a shard rank gets only the sum of its range
    """
    if R == 1:
        return [BucketLayout(packing.size, list_slots(packing, 0, packing.size), n, scatters=cut)]
    length = -(-packing.size // n)
    return [BucketLayout(length, list_slots(packing, i * length, (i + 1) * length), R) for i in range(n)]


def list_slots(packing: Packing, start: int, stop: int) -> tuple[GradientSlot, ...]:
    """Return the slots of the arrays in [start, stop) of a buffer.

    The complete rows of an array share one slot; an incomplete first or last row has its own slot.
    """
    slots = []
    for array, first in sorted(zip(packing.arrays, packing.starts, strict=True), key=lambda pair: pair[1]):
        begin, end = max(first, start), min(first + array.size, stop)
        if begin >= end:
            continue
        head = min(begin + (first - begin) % array.width, end)  # start of the complete rows
        tail = max(end - (end - first) % array.width, head)
        for a, b in ((begin, head), (head, tail), (tail, end)):
            if a < b:
                rows = (b - a) // array.width
                complete = array.count > 1 and (a, b) == (head, tail)
                slots.append(GradientSlot(array.name, a - start, (rows, array.width) if complete else (b - a,)))
    return tuple(slots)


def build_kept_registry(
    arrays: ModelLayout, plan: Plan, mesh: Mesh, zero: int, reduction: GradientReduction, dtype: str
) -> Registry:
    """Return the registry of the arrays that `reduction` keeps for all buffers of the run, on all pipeline stages."""
    layouts: dict[str, Layout] = {}
    for group, buffers in arrays.groups.items():
        for (index, buffer), pp in product(enumerate(buffers), arrays.stage[group]):
            ranks = StateRanks.of(plan, mesh, buffer.kind.fold)
            if buffer.kind.trained and ranks.shards * ranks.replicas > 1:
                buckets = make_bucket_layouts(buffer.packing, ranks.shards, ranks.replicas, zero > 0)
                layouts.update(
                    iterate_layouts(reduction, mesh, _format_name(pp, group, index), buckets, dtype, (("pp", pp),))
                )
    return Registry.of(mesh, layouts)


def iterate_kept_shards(
    groups: Mapping[str, Sequence[ParamBuffer]], reduction: GradientReduction, registry: Registry, rank: int
) -> Iterator[Shard]:
    """Yield this rank's shards of the arrays that `reduction` keeps."""
    pp = registry.mesh.coordinate(rank)["pp"]
    for group, buffers in groups.items():
        for index, buffer in enumerate(buffers):
            for comm in (buffer.reducer.replicas, buffer.reducer.shard):
                if isinstance(comm, ReducedComm):
                    yield from iterate_shards(reduction, registry, rank, _format_name(pp, group, index), comm.state)


def _format_name(pp: int, group: str, index: int) -> str:
    return f"{pp}/{group}.{index}"
