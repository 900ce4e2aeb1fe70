"""Pipeline schedules by name, with closed forms of their bubble (idle time) and peak number of chunk activations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM
from gangline_parallel_megatron_style.pipeline.actions import PipelineAction, Placement, Schedule
from gangline_parallel_megatron_style.pipeline.classic import (
    make_1f1b_schedule,
    make_gpipe_schedule,
    make_zb_h1_schedule,
)
from gangline_parallel_megatron_style.pipeline.dualpipe_v import make_dualpipe_v_schedule
from gangline_parallel_megatron_style.pipeline.interleaved import make_interleaved_1f1b_schedule
from gangline_parallel_megatron_style.pipeline.zb_v import make_zb_v_schedule


@dataclass(frozen=True, kw_only=True)
class ScheduleType:
    """A kind of pipeline schedule.

    In the comments: p ranks, m microbatches, v chunks per rank, k action times of one chunk.
    """

    summary: str
    chunks: int  # default number of chunks per rank
    free_chunks: bool = False  # whether the user may set another number of chunks
    placement: Placement = "loop"
    splits_backward: bool = False  # whether any backward is split into I and W
    needs_times: bool = False  # whether the order of actions depends on their times
    # whether forwards may overlap with backwards; with overlap `idle` does not hold: see `make_dualpipe_v_schedule`
    pairs: bool = False
    generate: Callable[[int, int, int, ActionTimes | Sequence[ActionTimes]], Schedule]  # p, m, v, k
    idle: Callable[[int, ActionTimes], float]  # (p, k) -> idle time of each rank, if `exact` and F = I = W
    exact: Callable[[int, int], bool]  # (p, m) -> whether `idle` is exact; if not, use `simulate`
    activations: Callable[[int, int, int, int], int]  # (p, m, v, rank) -> peak activations, each of one chunk

    def compute_bubble(self, ranks: int, microbatches: int, chunks: int, times: ActionTimes = UNIFORM) -> float:
        """Return the bubble by the closed form: the share of a step that a rank waits, 0 to 1."""
        idle = self.idle(ranks, times)
        return idle / (idle + microbatches * chunks * (times.F + times.get_time("B")))


SCHEDULES: dict[str, ScheduleType] = {
    "gpipe": ScheduleType(
        summary="all forwards, then all backwards; stores the activations of all microbatches",
        chunks=1,
        generate=lambda p, m, v, k: make_gpipe_schedule(p, m),
        idle=lambda p, k: (p - 1) * (k.F + k.get_time("B")),
        exact=lambda p, m: True,
        activations=lambda p, m, v, rank: m,
    ),
    "1f1b": ScheduleType(
        summary="one backward after each forward; least memory among schedules of one chunk per rank",
        chunks=1,
        generate=lambda p, m, v, k: make_1f1b_schedule(p, m),
        idle=lambda p, k: (p - 1) * (k.F + k.get_time("B")),
        exact=lambda p, m: True,
        activations=lambda p, m, v, rank: min(m, p - rank),
    ),
    "interleaved_1f1b": ScheduleType(
        summary="1F1B over v chunks per rank: the bubble is divided by v, the traffic multiplied by v",
        chunks=2,
        free_chunks=True,
        generate=lambda p, m, v, k: make_interleaved_1f1b_schedule(p, m, v),
        idle=lambda p, k: (p - 1) * (k.F + k.get_time("B")),
        exact=lambda p, m: m % p == 0,
        activations=lambda p, m, v, rank: min(m * v, 2 * (p - rank - 1) + (v - 1) * p + 1),
    ),
    "zb_h1": ScheduleType(
        summary="1F1B that computes weight gradients in the bubble, which shrinks to a third",
        chunks=1,
        splits_backward=True,
        generate=lambda p, m, v, k: make_zb_h1_schedule(p, m),
        idle=lambda p, k: (p - 1) * (k.F + k.I - k.W),
        exact=lambda p, m: m >= p,
        activations=lambda p, m, v, rank: min(m, p),
    ),
    "zb_v": ScheduleType(
        summary="two chunks per rank as a V, split backward: waits only for the first forward to reach the last rank",
        chunks=2,
        placement="v",
        splits_backward=True,
        needs_times=True,
        generate=lambda p, m, v, k: make_zb_v_schedule(p, m, k),
        idle=lambda p, k: (p - 1) * k.F,
        exact=lambda p, m: m >= 2 * p,
        activations=lambda p, m, v, rank: min(2 * m, 2 * p),
    ),
    "dualpipe_v": ScheduleType(
        summary="two chunks per rank as a V, forwards overlap with backwards; split backward only at start and end",
        chunks=2,
        placement="v",
        splits_backward=True,
        pairs=True,
        generate=lambda p, m, v, k: make_dualpipe_v_schedule(p, m),
        idle=lambda p, k: (p - 1) * (k.F + k.I - k.W),
        exact=lambda p, m: m >= 2 * p,
        activations=lambda p, m, v, rank: min(2 * m, 2 * p + 1),
    ),
}


def make_schedule(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    times: ActionTimes | Sequence[ActionTimes] = UNIFORM,
    overlap: bool = False,
) -> Schedule:
    """Make the pipeline schedule with the name `name`.

    times    action times, one value for all stages or one for each stage; equal on all ranks; only zb_v uses them
    overlap  whether forwards overlap with backwards if the schedule has such pairs (dualpipe_v); helps if modules wait
             for transfers. Without overlap the two actions of a pair run one after the other

    Raises ValueError for an unknown name and for sizes that the schedule does not support.
    """
    if name not in SCHEDULES:
        raise ValueError(f"unknown pipeline schedule {name}; choices: {', '.join(SCHEDULES)}")
    schedule_type = SCHEDULES[name]
    chunks = schedule_type.chunks if chunks is None else chunks
    if ranks < 1 or microbatches < 1 or chunks < 1:
        raise ValueError(
            f"{ranks} ranks, {microbatches} microbatches and {chunks} chunks per rank must each be at least 1"
        )
    if chunks != schedule_type.chunks and not schedule_type.free_chunks:
        raise ValueError(f"the pipeline schedule {name} needs chunks={schedule_type.chunks} per rank, not {chunks}")
    schedule = schedule_type.generate(ranks, microbatches, chunks, times)
    return schedule if overlap else replace(schedule, pairs=frozenset())


def make_forward_schedule(ranks: int, microbatches: int, chunks: int, placement: Placement) -> Schedule:
    """Make a schedule of forwards only, for evaluation.

    Idle time of each rank, with F of one chunk: (p - 1)F with placement "loop" (with several chunks: if p divides m),
    2(p - 1)F with placement "v", because the last rank can neither begin earlier nor end later.
    """

    def order_loop(rank: int) -> list[PipelineAction]:
        groups = [range(first, min(first + ranks, microbatches)) for first in range(0, microbatches, ranks)]
        return [
            PipelineAction("F", chunk, microbatch)
            for group in groups
            for chunk in range(chunks)
            for microbatch in group
        ]

    def order_v(rank: int) -> list[PipelineAction]:
        ahead = 2 * (ranks - 1 - rank) + 1  # number of forwards of chunk 0 before the first of chunk 1
        turns = [
            (microbatch + chunk * ahead, -chunk, microbatch) for chunk in (0, 1) for microbatch in range(microbatches)
        ]
        return [PipelineAction("F", -chunk, microbatch) for _, chunk, microbatch in sorted(turns)]

    of = order_loop if placement == "loop" else order_v
    return Schedule(ranks, chunks, microbatches, placement, tuple(tuple(of(rank)) for rank in range(ranks)))
