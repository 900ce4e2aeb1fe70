"""Simulation of a pipeline schedule from the times of its actions: makespan, bubble, peak activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM, expand_times
from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.dependencies import StageResult, get_result, list_needs, walk

Span = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """A schedule with the (start, end) of each action, simulated or recorded.

    spans: (start, end) of each action, by rank, in the order of `schedule.actions`
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @property
    def start(self) -> float:
        return min(spans[0][0] for spans in self.spans)

    @property
    def makespan(self) -> float:
        """Return the time from the first start to the last end of an action, over all ranks."""
        return max(end for spans in self.spans for _, end in spans) - self.start

    def compute_busy_time(self, rank: int) -> float:
        """Return the total time that a rank computes."""
        return sum(end - start for start, end in self.spans[rank])

    @property
    def bubble(self) -> float:
        """Return the share of the makespan that ranks wait, 0 to 1, on average over the ranks."""
        ranks = self.schedule.ranks
        return 1 - sum(map(self.compute_busy_time, range(ranks))) / (self.makespan * ranks)


def simulate(
    schedule: Schedule, times: ActionTimes | Sequence[ActionTimes] = UNIFORM, latency: float = 0.0
) -> Timeline:
    """Simulate a schedule: an action starts once its rank's earlier actions have ended and its inputs have arrived.

    The two actions of a pair begin when both have their inputs; together they take the sum of their times, and their
    spans follow each other.
    times    one value for all stages, or one for each stage
    latency  time from the end of an action until its result arrives on another rank

    Raises ValueError if the schedule deadlocks.
    """
    each = expand_times(times, schedule.stages)
    free = [0.0] * schedule.ranks
    result_ends: dict[StageResult, tuple[float, int]] = {}
    spans: list[list[Span]] = [[] for _ in free]
    for rank, turn in walk(schedule):
        at = free[rank]
        for action in turn:
            for need in list_needs(schedule, rank, action):
                end, where = result_ends[need]
                at = max(at, end if where == rank else end + latency)
        for action in turn:
            start, at = at, at + each[schedule.get_stage(rank, action.chunk)].get_time(action.kind)
            spans[rank].append((start, at))
        free[rank] = at
        for stage_result in filter(None, (get_result(schedule, rank, action) for action in turn)):
            result_ends[stage_result] = (at, rank)
    return Timeline(schedule, tuple(map(tuple, spans)))


def count_peak_activations(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, the peak number of activations that it holds, each of one microbatch on one stage.

    A rank holds an activation from F to B or W. Part of an activation is already free after I, so the number is an
    upper bound.
    """
    peaks = []
    for order in schedule.actions:
        live = peak = 0
        for action in order:
            live += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind]
            peak = max(peak, live)
        peaks.append(peak)
    return tuple(peaks)
