"""Traffic, memory and work of a layout from closed forms, without a run and without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline.explain.explained import Explained, RankExplained, StepAction, Transfer
from gangline.mesh import DATA_AXES
from gangline_parallel_megatron_style.cost import activations, memory, peak_memory, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import build_transfer

if TYPE_CHECKING:
    from gangline_parallel_megatron_style.pipeline.actions import Schedule, StepTurns


def explain_case(case: Case, gpu: bool = True, matmul_format: str = "bf16") -> Explained:
    """Return the traffic, memory and work of a case.

    gpu       whether modules run the kernels of a GPU, as in `ActivationSizes`
    matmul_format  number format of the matmuls of blocks
    """
    schedule = timing.find_schedule(case)
    return Explained(
        mesh=case.mesh,
        topology=case.config.topology,
        ranks=tuple(_explain_ranks(case, schedule, gpu)),
        work=tuple(timing.count_stage_work(case, gpu)),
        microbatches=case.microbatches,
        tokens=case.tokens * case.cp * case.microbatches * case.mesh.size(*DATA_AXES),
        state_bytes=case.bytes.gradient
        + int(2 * (1 + case.optimizer.count_states(matrix=True)) * case.bytes.master)
        + case.bytes.compute,
        token_flops=case.model.count_token_flops(case.sequence_length),
        parameters=case.model.parameters,
        matmul_format=matmul_format,
        schedule=case.config.schedule if case.pp > 1 else "none",
    )


@dataclass(frozen=True)
class Alike:
    """Traffic, memory and work that are equal on pipeline ranks with equal modules."""

    transfers: tuple[Transfer, ...]
    blocks: int
    parameters: int
    updated: int
    flops: int
    state: Counter[str]
    fullest: Counter[str]

    @classmethod
    def of(cls, case: Case, rank: int, gpu: bool) -> Alike:
        arrays = case.list_held(rank)
        own_stages = set(case.get_stages(rank))
        stepped = [
            array for array in arrays if array.trained and array.stages[0] in own_stages
        ]  # the copy of a tied parameter has no optimizer state
        return cls(
            transfers=tuple(build_transfer(case, entry) for entry in traffic.list_timed(case, rank)),
            blocks=len(case.list_blocks(rank)),
            parameters=sum(array.size for array in arrays),
            updated=sum(memory.count_state_numbers(case, array) for array in stepped),
            flops=timing.count_rank_flops(case, rank),
            state=memory.count_state_bytes(case, rank),
            fullest=peak_memory.find_fullest_moment(case, rank, activations.make_activation_sizes(case, gpu)),
        )


def _explain_ranks(case: Case, schedule: Schedule | None, gpu: bool) -> Iterator[RankExplained]:
    rank_kinds: dict[object, Alike] = {}
    sizes, turns = activations.make_activation_sizes(case, gpu), _list_turns(case, schedule)
    for rank in range(case.pp):
        stages = case.get_stages(rank)
        key: object = rank
        if 0 not in stages and case.last_stage not in stages and not case.optimizer.maps_matrices():
            key = tuple(tuple(map(case.get_kind, case.stages[stage])) for stage in stages)
        if key not in rank_kinds:
            rank_kinds[key] = Alike.of(case, rank, gpu)
        alike, under_way = rank_kinds[key], peak_memory.count_under_way(case, rank, schedule, sizes)
        yield RankExplained(
            bytes=peak_memory.sum_moment(alike.state, alike.fullest, under_way),
            transfers=alike.transfers,
            stages=tuple(stages),
            blocks=alike.blocks,
            parameters=alike.parameters,
            updated=alike.updated,
            flops=alike.flops,
            turns=turns[rank],
        )


def _list_turns(case: Case, schedule: Schedule | None) -> list[StepTurns]:
    """Return the turns (`pipeline.actions`) of every pipeline rank in a step."""
    if schedule is None:
        return [tuple((StepAction(kind, 0, number),) for number in range(case.microbatches) for kind in ("F", "B"))]
    return schedule.step_turns
