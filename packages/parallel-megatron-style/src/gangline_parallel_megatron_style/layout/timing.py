"""What a step computes, and how long a pipeline waits."""

from __future__ import annotations

from gangline.config.schema import Recompute
from gangline.model.flops import BACKWARD_AND_FORWARD
from gangline.model.tree import Node, nodes
from gangline_parallel_megatron_style.layout.case import Case
from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.costs import Costs
from gangline_parallel_megatron_style.pipeline.schedules import make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import simulate


def stage_flops(case: Case) -> list[tuple[int, int]]:
    """(forward, forward again where blocks are recomputed) of one token in each model stage, before tp cuts; what tp
    leaves whole counts as often as there are ranks that compute it.
    """
    found = []
    for stage, blocks in enumerate(case.stages):
        each = [part_flops(case, f"{case.plan.blocks}.{index}") for index in blocks]
        again = [
            flops
            for index, flops in zip(blocks, each, strict=True)
            if case.recomputed(index) and case.recompute is Recompute.full
        ]
        ends = [case.plan.embed] * (stage == 0) + [case.plan.head] * (stage == case.last_stage)
        around = sum(part_flops(case, part) for part in ends)
        found.append((sum(each) + around, sum(again)))
    return found


def part_flops(case: Case, part: str) -> int:
    """Forward, of one token in the node at path `part` and all in it."""
    return sum(
        node.flops(case.sequence_length) * (1 if case.sequence_parallel or _cut(case, path, node) else case.tp)
        for path, node in nodes(case.by_path[part], part)
    )


def _cut(case: Case, path: str, node: Node) -> bool:
    """Whether tp cuts what a node computes: by its own matrices, or where it has none by those of the nodes in it."""
    own = any(len(shape) > 1 for shape in node.shapes().values())
    inside = [(path, node)] if own else nodes(node, path)
    return any(
        "tp" in case.plan.cuts_of(f"{at}.{name}", len(shape))
        for at, inner in inside
        for name, shape in inner.shapes().items()
    )


def flops(case: Case, rank: int) -> int:
    """Operations of a rank of pipeline rank `rank` in a step, recomputation included (counted as core counts them)."""
    each = stage_flops(case)
    per_token = sum(BACKWARD_AND_FORWARD * each[stage][0] + each[stage][1] for stage in case.stages_of(rank))
    return per_token * case.tokens * case.micros // case.tp


def schedule_of(case: Case) -> Schedule | None:
    """The pipeline's schedule; None without a pipeline."""
    if case.pp == 1:
        return None
    chunks = len(case.stages) // case.pp
    name = case.config.schedule
    overlap = case.config.overlaps(case.plan, case.mesh)
    return make_schedule(name, ranks=case.pp, micros=case.micros, chunks=chunks, costs=costs(case), overlap=overlap)


def costs(case: Case) -> list[Costs]:
    """Of each model stage, by what it computes: the input's gradient and the weights' one forward pass each."""
    return [Costs(float(there), float(there + again), float(there)) for there, again in stage_flops(case)]


def bubble(case: Case, schedule: Schedule | None) -> float:
    """The share of the ranks' time in which they wait for each other, simulated with each stage's own costs."""
    return simulate(schedule, costs(case)).bubble if schedule is not None else 0.0
