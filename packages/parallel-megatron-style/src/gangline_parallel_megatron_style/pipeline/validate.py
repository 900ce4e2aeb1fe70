"""Validation that a pipeline schedule can run and computes the same gradients as one process."""

from __future__ import annotations

from collections import Counter

from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Schedule
from gangline_parallel_megatron_style.pipeline.dependencies import walk


def validate(schedule: Schedule) -> None:
    """Raise ValueError for the first error in a schedule.

    Each rank must run F once for every chunk and microbatch, and either B once or I and W once each. The gradients of
    each chunk must be added in the order of the microbatches, because the order of a sum determines its bits. The
    schedule must not deadlock.
    """
    if len(schedule.actions) != schedule.ranks:
        raise ValueError(f"the schedule has {len(schedule.actions)} lists of actions for {schedule.ranks} ranks")
    for rank, order in enumerate(schedule.actions):
        _complete(schedule, rank, order)
        _check_order(rank, order)
    for _ in walk(schedule):
        pass


def _complete(schedule: Schedule, rank: int, order: tuple[PipelineAction, ...]) -> None:
    count = Counter(order)
    for chunk in range(schedule.chunks):
        for microbatch in range(schedule.microbatches):
            forward, whole, inputs, weights = (
                count.pop(PipelineAction(kind, chunk, microbatch), 0) for kind in ("F", "B", "I", "W")
            )
            if forward != 1:
                raise ValueError(
                    f"rank {rank} runs {PipelineAction('F', chunk, microbatch)} {forward} times instead of once"
                )
            if (whole, inputs, weights) not in ((1, 0, 0), (0, 1, 1)):
                raise ValueError(
                    f"rank {rank} runs B {whole}, I {inputs} and W {weights} times for microbatch {microbatch} "
                    f"of chunk {chunk}, instead of B once or I and W once each"
                )
    if count:
        raise ValueError(f"rank {rank} runs {next(iter(count))}, a chunk or microbatch that does not exist")


def _check_order(rank: int, order: tuple[PipelineAction, ...]) -> None:
    for kinds in ("BI", "BW"):  # weight gradients that layers do not defer accumulate in I
        last: dict[int, int] = {}
        for action in order:
            if action.kind not in kinds:
                continue
            before = last.get(action.chunk, -1)
            if action.microbatch != before + 1:
                raise ValueError(
                    f"rank {rank} runs {action} after microbatch {before}: "
                    "the gradients of a chunk must be added in the order of the microbatches"
                )
            last[action.chunk] = action.microbatch
