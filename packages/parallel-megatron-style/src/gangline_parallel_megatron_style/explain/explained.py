"""What a layout does and costs, from closed forms alone: nothing is started, and torch is not imported."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline import UserError
from gangline.explain.explained import Explained, RankExplained, StepAction, Transfer
from gangline.mesh import DATA_AXES, Mesh
from gangline_parallel_megatron_style.config import AxesConfig
from gangline_parallel_megatron_style.cost import activations, memory, peak_memory, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import transfer
from gangline_parallel_megatron_style.layout import check

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.pipeline.actions import Schedule, StepTurns


def explained(run: Run) -> Explained:
    """The numbers of a run. Raises UserError for what does not fit, but not for what this machine lacks."""
    return of_case(case_of(run), run.run.device != "cpu", run.precision.products())


def case_of(run: Run) -> Case:
    """A run on its mesh. Raises UserError as `explained` does."""
    from gangline.config.check import layout_problems, meaningless, world_of
    from gangline.plugin.registry import installed

    if not isinstance(run.parallel, AxesConfig):
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


def of_case(case: Case, gpu: bool = True, products: str = "bf16") -> Explained:
    """The numbers of a case; `gpu` as in `explain.activations.ActivationSizes`, `products` the format of blocks'."""
    schedule = timing.schedule_of(case)
    return Explained(
        mesh=case.mesh,
        topology=case.config.topology,
        ranks=tuple(_ranks(case, schedule, gpu)),
        work=tuple(timing.stage_work(case, gpu)),
        microbatches=case.microbatches,
        tokens=case.tokens * case.cp * case.microbatches * case.mesh.size(*DATA_AXES),
        state_bytes=case.bytes.gradient
        + int(2 * (1 + case.optimizer.states(matrix=True)) * case.bytes.master)
        + case.bytes.compute,
        token_flops=case.model.token_flops(case.sequence_length),
        parameters=case.model.parameters,
        products=products,
        schedule=case.config.schedule if case.pp > 1 else "none",
    )


@dataclass(frozen=True)
class Alike:
    """What pipeline ranks with the same modules have in common."""

    transfers: tuple[Transfer, ...]
    blocks: int
    parameters: int
    updated: int
    flops: int
    state: Counter[str]
    fullest: Counter[str]

    @classmethod
    def of(cls, case: Case, rank: int, gpu: bool) -> Alike:
        held = case.held(rank)
        mine = set(case.stages_of(rank))
        stepped = [
            array for array in held if array.trained and array.stages[0] in mine
        ]  # the copy of a tied one is not
        return cls(
            transfers=tuple(transfer(case, sent) for sent in traffic.timed(case, rank)),
            blocks=len(case.blocks_of(rank)),
            parameters=sum(array.size for array in held),
            updated=sum(memory.part_of(case, array) for array in stepped),
            flops=timing.flops(case, rank),
            state=memory.state(case, rank),
            fullest=peak_memory.fullest(case, rank, activations.sizes_of(case, gpu)),
        )


def _ranks(case: Case, schedule: Schedule | None, gpu: bool) -> Iterator[RankExplained]:
    found: dict[object, Alike] = {}
    sizes, turns = activations.sizes_of(case, gpu), _turns(case, schedule)
    for rank in range(case.pp):
        stages = case.stages_of(rank)
        key: object = rank
        if 0 not in stages and case.last_stage not in stages and not case.optimizer.maps_matrices():
            key = tuple(tuple(map(case.kind, case.stages[stage])) for stage in stages)
        if key not in found:
            found[key] = Alike.of(case, rank, gpu)
        alike, under_way = found[key], peak_memory.under_way(case, rank, schedule, sizes)
        yield RankExplained(
            bytes=peak_memory.together(alike.state, alike.fullest, under_way),
            transfers=alike.transfers,
            stages=tuple(stages),
            blocks=alike.blocks,
            parameters=alike.parameters,
            updated=alike.updated,
            flops=alike.flops,
            turns=turns[rank],
        )


def _turns(case: Case, schedule: Schedule | None) -> list[StepTurns]:
    """Return the actions of every pipeline rank."""
    if schedule is None:
        return [tuple((StepAction(kind, 0, number),) for number in range(case.microbatches) for kind in ("F", "B"))]
    return schedule.step_turns


def _ours(config: type) -> bool:
    return issubclass(config, AxesConfig)
