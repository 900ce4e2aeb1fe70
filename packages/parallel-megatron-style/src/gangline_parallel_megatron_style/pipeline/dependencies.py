"""Dependencies between the actions of a schedule, and an order in which the actions of all ranks can run."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import NamedTuple

from gangline_parallel_megatron_style.pipeline.actions import Kind, PipelineAction, Schedule


class StageResult(NamedTuple):
    """A result that actions wait for: the output of a stage ("F"), or the gradient of its input ("B", from B or I)."""

    what: Kind
    stage: int
    microbatch: int


def get_result(schedule: Schedule, rank: int, action: PipelineAction) -> StageResult | None:
    """Return the result of an action that other actions wait for; None for W."""
    if action.kind == "W":
        return None
    return StageResult("F" if action.kind == "F" else "B", schedule.get_stage(rank, action.chunk), action.microbatch)


def list_needs(schedule: Schedule, rank: int, action: PipelineAction) -> tuple[StageResult, ...]:
    """Return the results that an action waits for."""
    stage, microbatch = schedule.get_stage(rank, action.chunk), action.microbatch
    if action.kind == "F":
        return (StageResult("F", stage - 1, microbatch),) if stage else ()
    if action.kind == "W":
        return (StageResult("B", stage, microbatch),)
    own = StageResult("F", stage, microbatch)
    return (own, StageResult("B", stage + 1, microbatch)) if stage + 1 < schedule.stages else (own,)


def walk(schedule: Schedule) -> Iterator[tuple[int, tuple[PipelineAction, ...]]]:
    """Yield (rank, turn) of every turn of all ranks, each after the turns it depends on and its rank's earlier turns.

    Raises ValueError, which names one missing result, if the schedule deadlocks.
    """
    stage_results: set[StageResult] = set()
    waiting: dict[StageResult, list[int]] = defaultdict(list)
    queues = [deque(schedule.iterate_turns(rank)) for rank in range(schedule.ranks)]
    ready = list(range(schedule.ranks))

    def find_missing(rank: int) -> tuple[PipelineAction, StageResult] | None:
        waits = ((action, need) for action in queues[rank][0] for need in list_needs(schedule, rank, action))
        return next(((action, need) for action, need in waits if need not in stage_results), None)

    while ready:
        rank = ready.pop()
        while queues[rank]:
            lacks = find_missing(rank)
            if lacks is not None:
                waiting[lacks[1]].append(rank)
                break
            turn = queues[rank].popleft()
            yield rank, turn
            for stage_result in filter(None, (get_result(schedule, rank, action) for action in turn)):
                stage_results.add(stage_result)
                ready += waiting.pop(stage_result, ())
    for rank in range(schedule.ranks):
        if queues[rank] and (lacks := find_missing(rank)) is not None:
            action, need = lacks
            raise ValueError(
                f"deadlock: rank {rank} waits before {action} for {need.what} of microbatch {need.microbatch} "
                f"on stage {need.stage}, which never ends"
            )
