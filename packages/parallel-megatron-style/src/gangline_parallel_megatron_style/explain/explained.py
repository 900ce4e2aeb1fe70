"""What a layout does and costs, from closed forms alone: nothing is started, and torch is not imported."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline import UserError
from gangline.strategy import Mesh
from gangline_parallel_megatron_style.config import Composed
from gangline_parallel_megatron_style.cost import peak_memory, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.layout import check

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.cost.links import Sent


@dataclass(frozen=True)
class RankCost:
    """What a rank costs; ranks of the same pipeline rank differ by rounding alone."""

    blocks: int
    parameters: int  # that it computes with, before data sharding
    flops: int  # of a step
    memory: Counter[str]  # kind -> bytes
    sent: list[Sent]


@dataclass(frozen=True)
class Explained:
    """A run's layout as numbers."""

    case: Case
    stages: list[RankCost]
    bubble: float

    @property
    def mesh(self) -> Mesh:
        return self.case.mesh

    @property
    def fullest(self) -> int:
        """The pipeline rank that needs most memory."""
        return max(range(len(self.stages)), key=lambda rank: self.stages[rank].memory.total())

    @property
    def busiest(self) -> int:
        """The pipeline rank that sends most."""
        return max(range(len(self.stages)), key=lambda rank: sum(sent.bytes for sent in self.stages[rank].sent))


def explained(run: Run) -> Explained:
    """The numbers of a run. Raises UserError for what does not fit, but not for what this machine lacks."""
    return of_case(case_of(run), gpu=run.run.device != "cpu")


def case_of(run: Run) -> Case:
    """A run on its mesh. Raises UserError as `explained` does."""
    from gangline.config import layout_problems, meaningless, world_of
    from gangline.plugins import installed

    if not isinstance(run.parallel, Composed):
        part = installed().part_of(run.parallel).part.name
        listed = ", ".join(name for name, offer in installed().offers("parallel").items() if _ours(offer.part.config))
        raise UserError(f"parallel={part} is not explained here.", f"These are: {listed}.")
    if problems := meaningless(run):
        raise UserError.of(problems)
    opened = [getattr(edit, name) for edit in run.edits.values() for name in installed().part_of(edit).part.opens]
    problems = [problem for part in (run.model, *run.edits.values(), *opened) for problem in part.check(run)]
    problems += check.check(run.parallel, run) or layout_problems(run)
    if problems:
        raise UserError.of(problems)
    return Case.of(run, Mesh.of(run.parallel.axes(world_of(run))))


def of_case(case: Case, gpu: bool = True) -> Explained:
    """The numbers of a case; `gpu` as in `cost.activations.ActivationSizes`."""
    schedule, stages = timing.schedule_of(case), []
    for rank in range(case.pp):
        numbers = sum(array.size for array in case.held(rank))
        needs, sent = peak_memory.of_rank(case, rank, schedule, gpu), traffic.of_rank(case, rank)
        stages.append(RankCost(len(case.blocks_of(rank)), numbers, timing.flops(case, rank), needs, sent))
    return Explained(case, stages, timing.bubble(case, schedule))


def _ours(config: type) -> bool:
    return issubclass(config, Composed)
