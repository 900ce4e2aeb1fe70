"""Timeline of a training step: start and end of each pipeline action.

Each action starts as soon as the previous action of its rank and all its dependencies have ended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.explain.explained import ActionKind, Explained, StepAction


@dataclass(frozen=True)
class ActionTimes:
    """Time of each kind of action on one stage (one chunk of one rank), in any unit.

    F: forward. I and W: the halves of a backward pass, gradients of the inputs and of the weights. B: a full backward
    pass, if it differs from I + W.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    B: float | None = None

    def get_time(self, kind: ActionKind) -> float:
        return self.I + self.W if kind == "B" and self.B is None else float(getattr(self, kind))


@dataclass(frozen=True)
class StepTimeline:
    """Spans (action, start, end) of each pipeline rank, in the unit of the `ActionTimes`."""

    spans: tuple[tuple[tuple[StepAction, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """Time at which the last action ends."""
        return max(spans[-1][2] for spans in self.spans)

    def compute_busy_time(self, rank: int) -> float:
        """Return the total time in which a pipeline rank computes."""
        return sum(end - start for _, start, end in self.spans[rank])

    @property
    def bubble(self) -> float:
        """Pipeline bubble: fraction of all ranks' time in which they are idle, 0 to 1."""
        return 1 - sum(map(self.compute_busy_time, range(len(self.spans)))) / (self.makespan * len(self.spans))


def step_timeline(explained: Explained, times: Sequence[ActionTimes], latency: float = 0.0) -> StepTimeline:
    """Return the timeline of a step of `explained`, with the `times` of its stages and a `latency` between ranks.

    F of a stage depends on F of the previous stage; B (or I) on B (or I) of the next stage and on the stage's F; W on
    the stage's I. Two actions of one turn run in sequence, after the dependencies of both have ended. Raises ValueError
    for a deadlock.
    """
    steps = _order(explained)
    seconds = {kind: [time.get_time(kind) for time in times] for kind in ("F", "B", "I", "W")}
    spans: list[list[tuple[StepAction, float, float]]] = [[] for _ in explained.ranks]
    free, ends = [0.0] * len(spans), [0.0] * len(steps)
    for index, (rank, turn, needs) in enumerate(steps):
        start = free[rank]
        for need in needs:
            end = ends[need] + latency
            if end > start:
                start = end
        own = spans[rank]
        for action in turn:
            end = start + seconds[action[0]][action[1]]
            own.append((action, start, end))
            start = end
        free[rank] = ends[index] = start
    return StepTimeline(tuple(map(tuple, spans)))


# (rank, its turn, indices of steps of other ranks on which the turn depends), in topological order
_Steps = list[tuple[int, tuple[StepAction, ...], tuple[int, ...]]]
# the key has ids of turns; the value holds the turns, so that no id is reused
_KNOWN: dict[tuple[int, ...], tuple[object, _Steps]] = {}


def _order(explained: Explained) -> _Steps:
    """Return the steps in topological order. Raises ValueError for a deadlock.

    The order is cached by the turns of all ranks, so layouts with the same turns share it. Dependencies within a rank
    are omitted, because its turns run in order.
    """
    all_turns = [rank.turns for rank in explained.ranks]
    key = (*map(id, all_turns), len(explained.work))
    if key not in _KNOWN:
        if len(_KNOWN) >= 64:
            del _KNOWN[next(iter(_KNOWN))]
        _KNOWN[key] = (all_turns, _order_turns(all_turns, len(explained.work) - 1))
    return _KNOWN[key][1]


def _order_turns(all_turns: Sequence[tuple[tuple[StepAction, ...], ...]], last: int) -> _Steps:
    producers: dict[tuple[str, int, int], tuple[int, int]] = {}  # result of an action -> (index of its step, rank)
    waiting: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    steps: _Steps = []
    at, ready = [0] * len(all_turns), list(range(len(all_turns)))
    while ready:
        rank = ready.pop()
        turns = all_turns[rank]
        while at[rank] < len(turns):
            turn = turns[at[rank]]
            needs = [need for action in turn for need in _list_needs(action, last)]
            lacks = next((need for need in needs if need not in producers), None)
            if lacks is not None:
                waiting[lacks].append(rank)
                break
            steps.append((rank, turn, tuple(producers[need][0] for need in needs if producers[need][1] != rank)))
            for kind, stage, microbatch in turn:
                if kind != "W":
                    key = ("F" if kind == "F" else "B", stage, microbatch)
                    producers[key] = (len(steps) - 1, rank)
                    ready += waiting.pop(key, ())
            at[rank] += 1
    for rank, turns in enumerate(all_turns):
        if at[rank] < len(turns):
            raise ValueError(
                f"deadlock in the pipeline schedule: rank {rank} waits forever before {turns[at[rank]][0]}"
            )
    return steps


def _list_needs(action: StepAction, last: int) -> tuple[tuple[str, int, int], ...]:
    kind, stage, microbatch = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("B", stage, microbatch),)
    own = ("F", stage, microbatch)
    return (own, ("B", stage + 1, microbatch)) if stage < last else (own,)
