"""Lower bounds on a layout's step time and memory.

The bounds are cheap, because layouts with equal tp and cp share most of the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from gangline.config import LayoutBounds
from gangline.explain.explained import Operation, Transfer, When
from gangline.explain.topology import Tier, Topology
from gangline.explain.work import StageWork
from gangline.mesh import DATA_AXES, Mesh
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline_parallel_megatron_style.cost import activations, timing, traffic
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import build_transfer, count_together
from gangline_parallel_megatron_style.layout.alike import group_blocks
from gangline_parallel_megatron_style.layout.stages import partition
from gangline_parallel_megatron_style.pipeline.actions import compute_stage
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES
from gangline_parallel_megatron_style.sharding.ranks import SHARD_AXES

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_parallel_megatron_style.config import AxesConfig

ROUGH = 0.9  # safety factor of the memory bound: rows and the arrays of a block may be sharded unevenly


@dataclass(frozen=True)
class Whole:
    """Numbers of one microbatch on one rank, without a pipeline.

    work         operations of the model
    transfers    transfers that the rank waits for in the forward and backward passes
    numbers      minimum number of parameters of a block on the rank, before its rows are sharded
    saved_bytes  minimum bytes that a block saves for its backward pass
    head         number of parameters of the head
    largest      number of parameters of the largest matrix of the head
    logits       bytes of the logits
    """

    work: StageWork
    transfers: tuple[Transfer, ...]
    numbers: int
    saved_bytes: int
    head: int
    largest: int
    logits: int


def compute_layout_bounds(
    config: AxesConfig, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None
) -> LayoutBounds | None:
    """Return lower bounds on time and memory; None if the batch, a fold or a matrix does not divide over its ranks.

    Returns None also if the layout has more stages than blocks.
    """
    share, rest = divmod(run.batch.global_size, mesh.size(*DATA_AXES))
    if rest or not share:
        return None
    micro = run.batch.micro_size or share // config.count_microbatches(share, mesh)
    microbatches, rest = divmod(share, micro)
    pp, schedule_type = mesh.size("pp"), SCHEDULES[config.schedule]
    chunks = config.model_chunks if pp > 1 else 1
    folds = ((mesh.size(*fold.out_of), fold.size) for fold in model[1].folds)
    if rest or pp * chunks > model[1].layers or any(have % size for have, size in folds):
        return None
    whole = _try_count(config, run, mesh, model, topology, micro)
    if whole is None:
        return None
    idle = 0.0
    if pp > 1 and not schedule_type.splits_backward:
        # with full backward passes, ranks idle at least while the first microbatch goes to the last rank and back
        idle = schedule_type.compute_bubble(pp, microbatches, chunks)
    blocks, network = _list_block_counts(config, run, mesh, model), topology or config.topology
    return LayoutBounds(
        idle=idle,
        bytes=_count_most_bytes(config, run, mesh, whole, microbatches, blocks),
        microbatches=microbatches,
        stages=pp * chunks,
        splits_backward=schedule_type.splits_backward and pp > 1,
        work=whole.work,
        transfers=whole.transfers,
        beside=_list_data_transfers(
            config, run, mesh, model[1], whole, microbatches, min(total for _, total, _ in blocks), network
        ),
    )


def _list_data_transfers(
    config: AxesConfig,
    run: Run,
    mesh: Mesh,
    plan: Plan,
    whole: Whole,
    microbatches: int,
    blocks: int,
    network: Topology,
) -> tuple[Transfer, ...]:
    """Return the transfers that `traffic.list_data_traffic` counts for a rank with `blocks` blocks.

    Returns () if the model has folds or frozen arrays, or if the gradient reduction is not a plain sum.
    """
    axes = tuple(axis for axis in SHARD_AXES if mesh.size(axis) > 1)
    if not axes or plan.folds or not run.gradients.plain or plan.frozen:
        return ()
    each = microbatches if config.zero >= 2 and not run.deterministic else 0
    width = run.precision.get_sizes()
    weight_gathers = microbatches if config.zero == 3 else 0
    return _list_transfers(
        mesh,
        axes,
        tuple(size for _, size in network.domains),
        network.find_tier(mesh, *axes),
        config.zero,
        each,
        weight_gathers,
        blocks,
        whole.numbers,
        width.wire,
        width.compute,
    )


@lru_cache(maxsize=4096)
def _list_transfers(
    mesh: Mesh,
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    tier: Tier,
    zero: int,
    each: int,
    weight_gathers: int,
    blocks: int,
    numbers: int,
    wire: int,
    compute: int,
) -> tuple[Transfer, ...]:
    """Return the transfers of gradients and weights of `blocks` blocks between data ranks, cached.

    sizes  number of ranks in a node, in a rack and in a datacentre
    each   number of gradient reductions per step (one per microbatch); 0: one at the end of the step
    weight_gathers  number of weight gathers per step (one per microbatch); 0: one after the optimizer step
    """
    ranks, near = mesh.size(*axes), [count_together(mesh, axes, size)[1] for size in sizes]

    def make_transfer(operation: Operation, when: When, times: int, itemsize: int) -> Transfer:
        return Transfer(
            axes=axes,
            purpose="",
            operation=operation,
            ranks=ranks,
            each_node=near[0],
            each_rack=near[1],
            each_datacentre=near[2],
            tier=tier,
            calls=times * blocks,
            bytes=numbers * blocks * itemsize * times * (ranks - 1) // ranks * (2 if operation == "all_reduce" else 1),
            when=when,
            waits=False,
        )

    if zero == 0:
        return (make_transfer("all_reduce", "end", 1, wire),)
    scatter = make_transfer("reduce_scatter", "B" if each else "end", each or 1, wire)
    return scatter, make_transfer("all_gather", "F" if weight_gathers else "update", weight_gathers or 1, compute)


def _count_most_bytes(
    config: AxesConfig, run: Run, mesh: Mesh, whole: Whole, microbatches: int, blocks: list[tuple[int, int, int]]
) -> int:
    """Return a lower bound on the peak bytes of the rank with most memory.

    It counts state and activations, and on the head's rank also the head's state, logits and gradients.
    blocks: (pipeline rank, number of its blocks, number of blocks of its smallest chunk)
    """
    width, shards, pp = run.precision.get_sizes(), mesh.size("dp_shard", "cp"), mesh.size("pp")
    state = run.optimizer.count_states(matrix=True) * width.master + (
        width.master if width.compute != width.master else 0
    )
    own = 0 if config.offload else state / (shards if config.zero else 1)
    weights = width.compute / (shards if config.zero == 3 else 1)
    gradients = width.gradient / (shards if config.zero >= 2 and not run.deterministic else 1)
    schedule_type, chunks = SCHEDULES[config.schedule], config.model_chunks if pp > 1 else 1
    most = 0.0
    for rank, total, fewest in blocks:
        peak_activations = schedule_type.activations(pp, microbatches, chunks, rank) if pp > 1 else 1
        rank_bytes = total * whole.numbers * (weights + gradients + own) + peak_activations * fewest * whole.saved_bytes
        head = pp - 1 if schedule_type.placement == "loop" or pp == 1 else 0
        if rank == head:
            cut = gradients < width.gradient
            both = width.gradient + (width.compute if width.compute != width.gradient and not cut else 0)
            rank_bytes += whole.head * (width.compute + (0 if cut else gradients) + own)
            rank_bytes += max(whole.logits, whole.largest * both + (whole.head * width.gradient if cut else 0))
        most = max(most, rank_bytes)
    return int(ROUGH * most)


def _try_count(
    config: AxesConfig, run: Run, mesh: Mesh, model: tuple[Node, Plan], topology: Topology | None, micro: int
) -> Whole | None:
    """Return the result of `_count`, cached by all options that affect it; None if a dim does not divide."""
    network = topology or config.topology
    key = (
        *(mesh.size("tp"), mesh.size("cp"), micro, config.sequence_parallel, config.context),
        *(
            run.batch.sequence_length,
            run.job.recompute,
            run.job.recompute_every,
            run.job.device,
            run.precision.get_sizes(),
        ),
        network.domains,
        mesh.sizes[1:] + (config.schedule, config.overlap) if model[1].folds else (),
    )

    def try_count() -> Whole | None:
        try:
            return _count(config, run, mesh, model, network, micro)
        except ValueError:  # heads or another dim do not divide over the ranks
            return None

    whole: Whole | None = group_blocks(*model).microbatches.get(key, try_count)
    return whole


def _count(config: AxesConfig, run: Run, mesh: Mesh, model: tuple[Node, Plan], network: Topology, micro: int) -> Whole:
    """Return the numbers of one microbatch of `micro` sequences. Raises ValueError if a dim does not divide."""
    plan = model[1]
    alone = replace(config, schedule="1f1b", chunks=None, stages=None, topology=network)
    one = replace(run, parallel=alone, batch=replace(run.batch, micro_size=micro))
    outer = ("pp",) if plan.folds else ("pp", *DATA_AXES)  # axes that do not affect the numbers of a microbatch
    sizes = tuple((axis, 1 if axis in outer else size) for axis, size in mesh.sizes)
    case = replace(Case.of(one, Mesh(sizes), model), microbatches=1)
    hides = config.overlaps(plan, mesh)  # whether another microbatch hides fold transfers
    parts = (
        traffic.list_tensor_traffic,
        traffic.list_context_traffic,
        *(() if hides else (traffic.list_fold_traffic,)),
    )
    transfers = [
        build_transfer(case, one) for part in parts for one in part(case, 0) if one.waits and one.when in ("F", "B")
    ]
    gpu = run.job.device != "cpu"
    numbers = [sum(array.size for array in case.list_arrays(kind)) for kind in set(case.model.kinds)]
    local = activations.make_activation_sizes(case, gpu)
    return Whole(
        work=timing.count_stage_work(case, gpu)[0],
        transfers=tuple(transfers),
        numbers=min(numbers),
        saved_bytes=min(
            activations.count_block(case, index, local) for index, _ in traffic.group_kinds(case, range(plan.layers))
        ),
        head=sum(array.size for array in case.list_arrays("head")),
        largest=max((array.size for array in case.list_arrays("head") if len(array.shape) > 1), default=0),
        logits=activations.count_head_bytes(case, local)["logits"],
    )


def _list_block_counts(
    config: AxesConfig, run: Run, mesh: Mesh, model: tuple[Node, Plan]
) -> list[tuple[int, int, int]]:
    """Return (rank, number of its blocks, number of blocks of its smallest chunk) of pipeline ranks.

    Ranks with equal numbers appear once; the last rank appears in any case.
    """
    pp, chunks, placement = mesh.size("pp"), config.model_chunks, SCHEDULES[config.schedule].placement
    if pp == 1:
        return [(0, model[1].layers, model[1].layers)]
    stages = config.stages and tuple(config.stages)
    key = (pp, chunks, placement, stages, run.batch.sequence_length)

    def count_kinds() -> list[tuple[int, int, int]]:
        sizes = list(map(len, partition(config, mesh, *model, run.batch.sequence_length)))
        kinds: dict[object, tuple[int, int, int]] = {}
        for rank in range(pp):
            own = [sizes[compute_stage(pp, placement, rank, chunk)] for chunk in range(chunks)]
            kind = (sum(own), min(own))
            kinds.setdefault((kind, rank == pp - 1), (rank, *kind))
        return list(kinds.values())

    block_counts: list[tuple[int, int, int]] = group_blocks(*model).partitions.get(key, count_kinds)
    return block_counts
