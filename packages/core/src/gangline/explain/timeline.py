"""When each action of a step runs, given what it costs: as early as its rank, its order and what it needs allow."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.explain.explained import ActionKind, Explained, StepAction


@dataclass(frozen=True)
class ActionTimes:
    """Time of each kind of action on one stage (one chunk of one rank), in any one unit.

    F: forward. I and W: the halves of a backward pass, into what came in and into the weights. B: the whole of it,
    where it is not I and W.
    """

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    B: float | None = None

    def of(self, kind: ActionKind) -> float:
        return self.I + self.W if kind == "B" and self.B is None else float(getattr(self, kind))


@dataclass(frozen=True)
class StepTimeline:
    """(action, start, end) by pipeline rank, in the unit of the times."""

    spans: tuple[tuple[tuple[StepAction, float, float], ...], ...]

    @property
    def makespan(self) -> float:
        """Until the last action ends."""
        return max(spans[-1][2] for spans in self.spans)

    def busy(self, rank: int) -> float:
        """Time in which a rank computes."""
        return sum(end - start for _, start, end in self.spans[rank])

    @property
    def bubble(self) -> float:
        """The share of all ranks' time in which they wait for each other, 0 to 1."""
        return 1 - sum(map(self.busy, range(len(self.spans)))) / (self.makespan * len(self.spans))


def step_timeline(explained: Explained, times: Sequence[ActionTimes], latency: float = 0.0) -> StepTimeline:
    """The step of `explained`, whose stages take `times` and whose ranks pass results on in `latency`.

    F of a stage needs F of the stage before; B (or I) needs that of the stage behind and its own F; W its own I. Two
    actions of one turn begin when both can, one lying behind the other. Raises ValueError where ranks wait for ever.
    """
    ranks, last = explained.ranks, len(explained.work) - 1
    done: dict[tuple[str, int, int], tuple[float, int]] = {}
    waiting: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    spans: list[list[tuple[StepAction, float, float]]] = [[] for _ in ranks]
    at, free = [0] * len(ranks), [0.0] * len(ranks)
    ready = list(range(len(ranks)))
    while ready:
        rank = ready.pop()
        turns = ranks[rank].turns
        while at[rank] < len(turns):
            turn, start = turns[at[rank]], free[rank]
            lacks = None
            for action in turn:
                for need in _needs(action, last):
                    if need not in done:
                        lacks = need
                        break
                    end, where = done[need]
                    start = max(start, end if where == rank else end + latency)
            if lacks is not None:
                waiting[lacks].append(rank)
                break
            for action in turn:
                end = start + times[action.stage].of(action.kind)
                spans[rank].append((action, start, end))
                start = end
            free[rank] = start
            for action in turn:
                if action.kind != "W":
                    key = ("F" if action.kind == "F" else "B", action.stage, action.microbatch)
                    done[key] = (start, rank)
                    ready += waiting.pop(key, ())
            at[rank] += 1
    for rank, explained_rank in enumerate(ranks):
        if at[rank] < len(explained_rank.turns):
            raise ValueError(f"pipeline rank {rank} waits for ever before {explained_rank.turns[at[rank]][0]}")
    return StepTimeline(tuple(map(tuple, spans)))


def _needs(action: StepAction, last: int) -> tuple[tuple[str, int, int], ...]:
    kind, stage, microbatch = action
    if kind == "F":
        return (("F", stage - 1, microbatch),) if stage else ()
    if kind == "W":
        return (("B", stage, microbatch),)
    own = ("F", stage, microbatch)
    return (own, ("B", stage + 1, microbatch)) if stage < last else (own,)
