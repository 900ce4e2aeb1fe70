"""What an action waits for, and an order in which all ranks' actions can run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from gangline_parallel_megatron_style.pipeline.actions import Action, Schedule


class Done(NamedTuple):
    """A result that others wait for: a stage's output ("F"), or the gradient of its input ("B", from B or I alike)."""

    what: str
    stage: int
    micro: int


def result(schedule: Schedule, rank: int, action: Action) -> Done | None:
    """What an action gives to others; None for W."""
    if action.kind == "W":
        return None
    return Done("F" if action.kind == "F" else "B", schedule.stage(rank, action.chunk), action.micro)


def needs(schedule: Schedule, rank: int, action: Action) -> tuple[Done, ...]:
    """What an action waits for."""
    stage, micro = schedule.stage(rank, action.chunk), action.micro
    if action.kind == "F":
        return (Done("F", stage - 1, micro),) if stage else ()
    if action.kind == "W":
        return (Done("B", stage, micro),)
    own = Done("F", stage, micro)
    return (own, Done("B", stage + 1, micro)) if stage + 1 < schedule.stages else (own,)


def walk(schedule: Schedule) -> Iterator[tuple[int, int, Action]]:
    """(rank, index, action) of every action, each after what it needs and after those before it on its rank.

    Raises ValueError where the ranks wait for each other for ever, and names what one of them waits for.
    """
    done: set[Done] = set()
    waiting: dict[Done, list[int]] = defaultdict(list)
    at = [0] * schedule.ranks
    ready = list(range(schedule.ranks))
    while ready:
        rank = ready.pop()
        order = schedule.actions[rank]
        while at[rank] < len(order):
            action = order[at[rank]]
            missing = next((need for need in needs(schedule, rank, action) if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            yield rank, at[rank], action
            at[rank] += 1
            given = result(schedule, rank, action)
            if given is not None:
                done.add(given)
                ready += waiting.pop(given, ())
    for rank, order in enumerate(schedule.actions):
        if at[rank] < len(order):
            action = order[at[rank]]
            missing = next(need for need in needs(schedule, rank, action) if need not in done)
            raise ValueError(
                f"rank {rank} waits for ever before {action}: {missing.what} of micro-batch {missing.micro} "
                f"on stage {missing.stage} never ends"
            )
