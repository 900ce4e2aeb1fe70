"""ZB-V schedule: no bubble except the time to reach the last rank, with the peak activations of 1F1B."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.action_times import UNIFORM, expand_times
from gangline_parallel_megatron_style.pipeline.actions import (
    Kind,
    PipelineAction,
    Schedule,
    compute_place,
    compute_stage,
)

# Priority by which a free rank chooses its next action. Only this order leaves no bubble if F = I = W (2 to 32 ranks).
PREFERENCE: tuple[tuple[Kind, int], ...] = (("F", 1), ("F", 0), ("I", 0), ("I", 1))
SAME_TIME = 1e-9  # tolerance for equal times, relative to the longest action: float sums depend on their order

Ends = dict[tuple[Kind, int, int], float]  # (F or I, stage, microbatch) -> time at which the action ends


class _Rank:
    """State of one rank while the schedule is built."""

    def __init__(self, ranks: int, microbatches: int, rank: int) -> None:
        self.stages = [compute_stage(ranks, "v", rank, chunk) for chunk in (0, 1)]
        self.last, self.microbatches = 2 * ranks - 1, microbatches
        self.room, self.held = 2 * ranks, [0, 0]  # number of activations: free slots; held, per chunk
        self.next = dict.fromkeys(PREFERENCE, 0)  # (kind, chunk) -> next microbatch
        self.deferred: deque[PipelineAction] = deque()
        self.actions: list[PipelineAction] = []
        self.free = 0.0

    def _is_ready(self, kind: Kind, chunk: int, microbatch: int, ends: Ends, until: float) -> bool:
        stage = self.stages[chunk]
        if kind == "F":
            # The last slot is for a forward of chunk 1: only chunk 1 leads to a backward, which frees memory.
            room = self.room > (1 if chunk == 0 and not self.held[1] else 0)
            return room and (stage == 0 or ends.get(("F", stage - 1, microbatch), until + 1) <= until)
        if stage == self.last:
            return ("F", stage, microbatch) in ends
        return ("F", stage, microbatch) in ends and ends.get(("I", stage + 1, microbatch), until + 1) <= until

    def choose(self, ends: Ends, until: float) -> PipelineAction | None:
        """Return the first action of `PREFERENCE` whose input arrives by `until`, else the oldest W, else None."""
        for kind, chunk in PREFERENCE:
            microbatch = self.next[kind, chunk]
            if microbatch < self.microbatches and self._is_ready(kind, chunk, microbatch, ends, until):
                return PipelineAction(kind, chunk, microbatch)
        return self.deferred[0] if self.deferred else None

    def begin(self, action: PipelineAction) -> None:
        self.actions.append(action)
        if action.kind == "W":
            self.deferred.popleft()
            self.room += 1
            self.held[action.chunk] -= 1
            return
        self.next[action.kind, action.chunk] += 1
        if action.kind == "F":
            self.room -= 1
            self.held[action.chunk] += 1
        else:
            self.deferred.append(action._replace(kind="W"))


def make_zb_v_schedule(ranks: int, microbatches: int, times: ActionTimes | Sequence[ActionTimes] = UNIFORM) -> Schedule:
    """Make the ZB-V schedule: two chunks a rank, as a V; a free rank runs the ready action of highest priority.

    Qi et al. 2023, arXiv 2401.10241, section 6; Pipeline Parallelism with Controllable Memory, arXiv 2405.15362 (V-ZB).
    Idle time of each rank: (p - 1)F, F of one chunk, if F = I = W and m >= 2p (rank p - 1 cannot begin earlier). Idle
    time is longer if F, I and W differ, and shortest if `times` are the real times.
    times: action times, one value for all stages or one for each stage
    Peak activations: at most 2p, each of one microbatch in one chunk: as much memory as 1F1B with p of two chunks each.
    """
    each = expand_times(times, 2 * ranks)
    slack = SAME_TIME * max(time.get_time(kind) for time in each for kind, _ in PREFERENCE)
    states = [_Rank(ranks, microbatches, rank) for rank in range(ranks)]
    ends: Ends = {}
    events = [(0.0, rank) for rank in range(ranks)]  # (time, rank): the rank may choose an action then
    while events:
        now = events[0][0] + slack
        woken = set()
        while events and events[0][0] <= now:
            woken.add(heapq.heappop(events)[1])
        for rank in sorted(woken):
            state = states[rank]
            if state.free > now or (action := state.choose(ends, now)) is None:
                continue
            stage = state.stages[action.chunk]
            state.begin(action)
            state.free = now - slack + each[stage].get_time(action.kind)
            heapq.heappush(events, (state.free, rank))
            if action.kind != "W":
                ends[action.kind, stage, action.microbatch] = state.free
                to = stage + 1 if action.kind == "F" else stage - 1
                if 0 <= to <= state.last:
                    heapq.heappush(events, (state.free, compute_place(ranks, "v", to)[0]))
    return Schedule(ranks, 2, microbatches, "v", tuple(tuple(state.actions) for state in states))
