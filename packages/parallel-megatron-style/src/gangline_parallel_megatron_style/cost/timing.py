"""Operations (FLOPs) of a step, and the bubble of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from gangline.config import Recompute
from gangline.explain.work import StageWork
from gangline.model.flops import computes_frozen
from gangline.model.tree import Node, iterate_nodes
from gangline_basics.explain.activations import count_node
from gangline_basics.explain.timeline import ActionTimes
from gangline_basics.explain.work import count_work
from gangline_parallel_megatron_style.cost import activations
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import simulate


@dataclass(frozen=True)
class Flops:
    """Operations of one token over all tp ranks; replicated work counts once for each rank that computes it.

    forward    operations of the forward pass
    recompute  operations of the second forward pass of recomputed blocks
    weights    operations of weight gradients, except of frozen weights
    """

    forward: int = 0
    recompute: int = 0
    weights: int = 0

    @property
    def all(self) -> int:
        """Return all operations, including the input gradients, which cost as much as the forward pass."""
        return 2 * self.forward + self.recompute + self.weights

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.forward + other.forward, self.recompute + other.recompute, self.weights + other.weights)


def count_stage_flops(case: Case) -> list[Flops]:
    """Return the operations of one token in each model stage."""
    if "stage_flops" not in case.known:
        case.known["stage_flops"] = list(_count_stage_flops(case))
    stage_flops: list[Flops] = case.known["stage_flops"]
    return stage_flops


def _count_stage_flops(case: Case) -> Iterator[Flops]:
    kind_flops: dict[int, Flops] = {}  # kind of block -> operations
    for stage, blocks in enumerate(case.stages):
        ends = [case.plan.embed] * (stage == 0) + [case.plan.head] * (stage == case.last_stage)
        total = sum((count_part_flops(case, part) for part in ends), Flops())
        recomputed_paths = [
            path for path in case.head_blocks if case.is_recomputed(path) and case.recompute is Recompute.full
        ]
        if stage == case.last_stage:
            total += Flops(recompute=sum(count_part_flops(case, path).forward for path in recomputed_paths))
        for index in blocks:
            kind, _ = case.get_kind(index)
            if kind not in kind_flops:
                kind_flops[kind] = count_part_flops(case, f"{case.plan.blocks}.{index}")
            block = kind_flops[kind]
            recomputed = case.is_recomputed(index) and case.recompute is Recompute.full
            total += replace(block, recompute=block.forward if recomputed else 0)
        yield total


def count_part_flops(case: Case, part: str) -> Flops:
    """Return the operations of one token in the node at path `part` and its children."""
    forward = weights = 0
    for path, node in iterate_nodes(case.by_path[part], part):
        whole = case.tp > 1 and not case.sequence_parallel and not _is_sharded(case, path, node)
        flops = node.count_flops(case.sequence_length) * (case.tp if whole else 1)
        forward += flops
        weights += 0 if computes_frozen(path, node, case.plan) else flops
    return Flops(forward, 0, weights)


def _is_sharded(case: Case, path: str, node: Node) -> bool:
    """Return whether tp shards the work of a node: whether it shards the node's matrices, or else its children's."""
    own = any(len(shape) > 1 for shape in node.get_shapes().values())
    inside = [(path, node)] if own else iterate_nodes(node, path)
    return any(
        "tp" in case.plan.get_shard_rules(f"{at}.{name}", len(shape))
        for at, inner in inside
        for name, shape in inner.get_shapes().items()
    )


def count_rank_flops(case: Case, rank: int) -> int:
    """Return the operations of a rank of pipeline rank `rank` in a step, with recomputation, counted as in core."""
    per_token = sum(count_stage_flops(case)[stage].all for stage in case.get_stages(rank))
    return per_token * case.tokens * case.microbatches // case.tp


def count_stage_work(case: Case, gpu: bool = True) -> list[StageWork]:
    """Return the work of each model stage for a microbatch on one rank, as shapes; equal stages share one result."""
    sizes, stage_work = activations.make_activation_sizes(case, gpu), []
    part_work: dict[object, StageWork] = {}
    totals: dict[object, StageWork] = {}

    def count_part_work(path: str, recomputed: bool, key: object) -> StageWork:
        if key not in part_work:
            node = case.by_path[path]
            ulysses = case.config.context == "ulysses"
            work = count_work(node, path, case.plan, case.sizes, sequence_length=case.sequence_length, ulysses=ulysses)
            work = replace(work, saved_bytes=count_node(node, sizes, path))
            part_work[key] = work.apply_recompute(case.recompute is not Recompute.full) if recomputed else work
            for inside in case.head_blocks if path == case.plan.head else ():
                if case.is_recomputed(inside):
                    part_work[key] = part_work[key].add_recomputed(count_part_work(inside, True, inside))
        return part_work[key]

    for stage, blocks in enumerate(case.stages):
        ends = [case.plan.embed] * (stage == 0) + [case.plan.head] * (stage == case.last_stage)
        alike = (tuple(map(case.get_kind, blocks)), *ends)
        if alike not in totals:
            parts = [
                count_part_work(f"{case.plan.blocks}.{index}", case.is_recomputed(index), case.get_kind(index))
                for index in blocks
            ]
            totals[alike] = StageWork.add_up([*parts, *(count_part_work(path, False, path) for path in ends)])
        stage_work.append(totals[alike])
    return stage_work


def find_schedule(case: Case) -> Schedule | None:
    """Return the pipeline schedule of a case; None without a pipeline."""
    if case.pp == 1:
        return None
    chunks = len(case.stages) // case.pp
    name = case.config.schedule
    overlap = case.config.overlaps(case.plan, case.mesh)
    own = tuple(estimate_action_times(case)) if SCHEDULES[name].needs_times else UNIFORM
    return _make_cached_schedule(name, case.pp, case.microbatches, chunks, own, overlap)


@lru_cache(maxsize=64)
def _make_cached_schedule(
    name: str, ranks: int, microbatches: int, chunks: int, own: ActionTimes | tuple[ActionTimes, ...], overlap: bool
) -> Schedule:
    """Return the result of `make_schedule`, cached for all layouts with this schedule."""
    return make_schedule(name, ranks=ranks, microbatches=microbatches, chunks=chunks, times=own, overlap=overlap)


def estimate_action_times(case: Case) -> list[ActionTimes]:
    """Return the action times of each model stage, in operations per token.

    F is the forward pass, I the input gradient (as much as F) and the recomputation, W the weight gradients.
    """
    return [
        ActionTimes(float(one.forward), float(one.forward + one.recompute), float(max(1, one.weights)))
        for one in count_stage_flops(case)
    ]


def compute_bubble(case: Case, schedule: Schedule | None) -> float:
    """Return the bubble: the share of time that ranks wait for each other, simulated with each stage's action times."""
    return simulate(schedule, estimate_action_times(case)).bubble if schedule is not None else 0.0
