"""Data of a pipeline schedule: actions, the placement of the model's stages, and one list of actions for each rank.

stage       index of a stage, a group of consecutive blocks. There are ranks * chunks stages: stage 0 has the embedding,
            the last stage has the head
chunk       index of a stage among the stages of one rank (Megatron-LM: virtual stage, model chunk)
microbatch  index of a microbatch in the step
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

from gangline.explain.explained import StepAction

Kind = Literal["F", "B", "I", "W"]
Placement = Literal["loop", "v"]
KINDS: dict[Kind, str] = {
    "F": "forward",
    "B": "backward",
    "I": "input gradient",
    "W": "weight gradient",
}


class PipelineAction(NamedTuple):
    """One computation on one rank: F forward; B backward, or its halves I (input gradient) and W (weight gradient)."""

    kind: Kind
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of chunk {self.chunk}"


Orders = tuple[tuple[PipelineAction, ...], ...]  # one list of actions for each rank
StepTurns = tuple[tuple[StepAction, ...], ...]  # the turns of one rank: one action each, or two that overlap


@dataclass(frozen=True)
class Schedule:
    """The order in which each rank runs its actions; `simulate` derives their start and end times.

    placement "loop": stage s is on rank s % ranks (Megatron-LM's interleaving; with one chunk the plain pipeline).
    placement "v": two chunks per rank; stages go down the ranks and back up, so rank 0 has the first and last stage.
    pairs: (rank, forward) of each forward that overlaps with the rank's next action, a backward; both are one turn.
    While one action of a pair waits for a transfer, the other computes.
    """

    ranks: int
    chunks: int
    microbatches: int
    placement: Placement
    actions: Orders
    pairs: frozenset[tuple[int, PipelineAction]] = frozenset()

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def splits_backward(self) -> bool:
        """Return whether the schedule splits any backward into I and W."""
        return any(action.kind == "W" for order in self.actions for action in order)

    def iterate_turns(self, rank: int) -> Iterator[tuple[PipelineAction, ...]]:
        """Yield the turns of a rank in order: one action, or two actions that overlap."""
        order = iter(self.actions[rank])
        for action in order:
            yield (action, next(order)) if (rank, action) in self.pairs else (action,)

    @cached_property
    def step_turns(self) -> list[StepTurns]:
        """Return the turns of every rank, with stages instead of chunks; cached for all layouts with this schedule."""
        return [
            tuple(
                tuple(StepAction(kind, self.get_stage(rank, chunk), microbatch) for kind, chunk, microbatch in turn)
                for turn in self.iterate_turns(rank)
            )
            for rank in range(self.ranks)
        ]

    def get_stage(self, rank: int, chunk: int) -> int:
        """Return the stage that `rank` holds as `chunk`."""
        return compute_stage(self.ranks, self.placement, rank, chunk)

    def get_place(self, stage: int) -> tuple[int, int]:
        """Return the (rank, chunk) of a stage."""
        return compute_place(self.ranks, self.placement, stage)


def compute_stage(ranks: int, placement: Placement, rank: int, chunk: int) -> int:
    """Return the stage that `rank` holds as `chunk`."""
    within = rank if placement == "loop" or chunk % 2 == 0 else ranks - 1 - rank
    return chunk * ranks + within


def compute_place(ranks: int, placement: Placement, stage: int) -> tuple[int, int]:
    """Return the (rank, chunk) of a stage."""
    chunk, within = divmod(stage, ranks)
    return (within if placement == "loop" or chunk % 2 == 0 else ranks - 1 - within), chunk


def truncate_schedule(
    ranks: int, microbatches: int, chunks: int, placement: Placement, of: Callable[[int], list[PipelineAction]]
) -> Schedule:
    """Return a schedule for `microbatches` microbatches, truncated from a schedule for at least as many.

    of: function, rank -> actions of the longer schedule; actions of microbatches that do not exist are left out
    The remaining actions keep all their dependencies and their order, so the truncated schedule cannot deadlock, and
    takes neither more time nor more memory.
    """
    actions = tuple(tuple(action for action in of(rank) if action.microbatch < microbatches) for rank in range(ranks))
    return Schedule(ranks, chunks, microbatches, placement, actions)
