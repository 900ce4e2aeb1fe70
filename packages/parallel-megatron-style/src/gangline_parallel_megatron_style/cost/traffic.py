"""Traffic of a rank in a step, by axis: number of messages and bytes.

In an all-gather of X bytes in total over n ranks each rank sends X (n - 1) / n bytes, and as many in a reduce-scatter;
an all-reduce is both (ring algorithms; Thakur, Rabenseifner and Gropp 2005, sections 4.1 to 4.4). `calls` counts
collectives, or messages in a pipeline.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from math import gcd

from gangline.config import Recompute
from gangline.config.gradient_sizes import count_ring_bytes
from gangline.explain.explained import Operation, When
from gangline.model.tree import iterate_nodes
from gangline_basics.model.decoder_nodes import AttentionNode
from gangline_basics.parallel.owners import list_matrix_traffic
from gangline_parallel_megatron_style.cost import memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import BESIDE, Sent, gather
from gangline_parallel_megatron_style.cost.parameters import Array, ParamGroup
from gangline_parallel_megatron_style.cost.tensor_traffic import get_owner_rank, group_kinds, list_tensor_traffic
from gangline_parallel_megatron_style.sharding.arrays import EMBED
from gangline_parallel_megatron_style.sharding.ranks import SHARD_AXES, StateRanks


def list_sent(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of a rank of pipeline rank `rank` in a step, one entry for each (axes, purpose)."""
    return _merge(list_timed(case, rank), lambda sent: (sent.axes, sent.purpose))


def list_timed(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of a rank of pipeline rank `rank` in a step.

    One entry for each (axes, purpose, operation, `when`, `waits`, `among`).
    """
    parts = (
        list_tensor_traffic,
        list_context_traffic,
        list_fold_traffic,
        list_pipeline_traffic,
        list_data_traffic,
        list_optimizer_traffic,
    )
    traffic = (entry for part in parts for entry in part(case, rank))
    return _merge(traffic, lambda sent: (sent.axes, sent.purpose, sent.operation, sent.when, sent.waits, sent.among))


def _merge(all_sent: Iterable[Sent], key: Callable[[Sent], Hashable]) -> list[Sent]:
    totals: dict[Hashable, Sent] = {}
    for entry in all_sent:
        totals[key(entry)] = totals[key(entry)] + entry if key(entry) in totals else entry
    return [entry for entry in totals.values() if entry.calls]


# --- cp --------------------------------------------------------------------------------------------------------------


def list_context_traffic(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of context parallelism.

    Ring (arXiv 2310.01889, section 3): keys and values go round the ranks, in the backward pass with their gradients.
    Ulysses (arXiv 2309.14509, section 3): all-to-all of queries, keys and values, all-to-all of the output, and the
    same for gradients in the backward pass.
    """
    if case.cp == 1:
        return []
    traffic = []
    blocks = [(case.blocks[i], case.is_recomputed(i), alike) for i, alike in group_kinds(case, case.list_blocks(rank))]
    if case.last_stage in case.get_stages(rank):
        blocks += [(block, case.is_recomputed(path), 1) for path, block in case.head_blocks.items()]
    for block, recomputed, alike in blocks:
        recomputations = 1 if recomputed else 0
        for _, node in iterate_nodes(block):
            if isinstance(node, AttentionNode):
                count_traffic = _count_ulysses_traffic if case.config.context == "ulysses" else _count_ring_traffic
                ring, m = count_traffic is _count_ring_traffic, case.microbatches * alike
                operation: Operation = "send" if ring else "all_to_all"
                (calls, nbytes), (first, firsts) = count_traffic(case, node, recomputations), _forward(case, node)
                ways: tuple[tuple[int, int, When], ...] = ((first, firsts, "F"), (calls - first, nbytes - firsts, "B"))
                for count, size, when in ways:
                    traffic.append(Sent(("cp",), "attention", m * count, m * size, None, operation, when, not ring))
    if gathers := sum(_count_position_gathers(case, stage) for stage in case.get_stages(rank)):
        traffic.append(gather(("cp",), "positions", case.cp, case.microbatches * gathers, 8 * case.tokens * case.cp))
    return traffic


def _count_position_gathers(case: Case, stage: int) -> int:
    """Return the number of gathers of positions per microbatch and stage.

    Ulysses: 1 for all layers. Ring attention: 1 for each different attention call with a window.
    """
    if case.config.context == "ulysses":
        return 1
    kinds = {case.model.kinds[index] for index in case.stages[stage]}
    inside = [node for index in kinds for _, node in iterate_nodes(case.blocks[index])]
    return len({node.call for node in inside if isinstance(node, AttentionNode) and node.window is not None})


def _forward(case: Case, node: AttentionNode) -> tuple[int, int]:
    """Return (messages, bytes) of one forward pass of a microbatch: half of Ulysses' total, or one ring pass."""
    if case.config.context == "ulysses":
        calls, nbytes = _count_ulysses_traffic(case, node, 0)
        return calls // 2, nbytes // 2
    (calls, nbytes), (fewer, less) = _count_ring_traffic(case, node, 0), _count_ring_traffic(case, node, -1)
    return calls - fewer, nbytes - less


def _count_ring_traffic(case: Case, node: AttentionNode, recomputations: int) -> tuple[int, int]:
    """Return (messages, bytes) of ring attention for a microbatch, forward and backward.

    Gradients of keys and values move in float32 at least, and take one step more than keys and values.
    recomputations: number of additional forward passes (recomputation)
    """
    numbers = 2 * case.tokens * max(1, node.kv_heads // case.tp) * node.head_dim
    rounds = (2 + recomputations) * (case.cp - 1)
    return rounds + case.cp, numbers * (rounds * case.bytes.compute + case.cp * max(4, case.bytes.compute))


def _count_ulysses_traffic(case: Case, node: AttentionNode, recomputations: int) -> tuple[int, int]:
    """Return (all-to-alls, bytes) of Ulysses for a microbatch, forward and backward.

    Key heads that do not divide over cp are repeated. Selective recomputation of attention ends before the all-to-all
    of the output, whose result the backward pass does not need.
    recomputations: number of additional forward passes (recomputation)
    """
    heads, key_heads = node.heads // case.tp, max(1, node.kv_heads // case.tp)
    key_heads *= case.cp // gcd(case.cp, key_heads)
    numbers = case.tokens * node.head_dim * (2 * heads + 2 * key_heads)
    passes = 2 + recomputations
    ends_early = recomputations if case.recompute is Recompute.selective else 0
    total = passes * numbers - ends_early * case.tokens * node.head_dim * heads
    return 2 * passes - ends_early, total * case.bytes.compute * (case.cp - 1) // case.cp


# --- folds -----------------------------------------------------------------------------------------------------------


def list_fold_traffic(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of modules on folds, as their nodes declare it; fully recomputed blocks run forward twice."""
    traffic = []
    for stage in case.get_stages(rank):
        ends = [case.plan.embed] * (stage == 0) + [case.plan.head] * (stage == case.last_stage)
        parts = [(case.by_path[part], part, 1, 1) for part in ends]
        full = case.recompute is Recompute.full
        for index, alike in group_kinds(case, case.stages[stage]):
            parts.append((case.blocks[index], "", 2 if full and case.is_recomputed(index) else 1, alike))
        twice = [f"{path}." for path in case.head_blocks if full and case.is_recomputed(path)]
        for part, path, once, alike in parts:
            for at, node in iterate_nodes(part, path):
                passes = 2 if any(at.startswith(block) for block in twice) else once
                for volume in node.list_volumes(case.sizes):
                    (calls, nbytes), (back_calls, back) = volume.forward, volume.backward
                    m, fold, waits = (
                        case.microbatches * alike,
                        (volume.fold,),
                        not case.config.overlaps(case.plan, case.mesh),
                    )
                    traffic.append(
                        Sent(fold, volume.what, m * calls, m * nbytes, volume.among, "all_to_all", "F", waits)
                    )
                    calls, nbytes = (passes - 1) * calls + back_calls, (passes - 1) * nbytes + back
                    traffic.append(
                        Sent(fold, volume.what, m * calls, m * nbytes, volume.among, "all_to_all", "B", waits)
                    )
    return traffic


# --- pp --------------------------------------------------------------------------------------------------------------


def list_pipeline_traffic(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of hidden states to the next stage, gradients to the previous stage, and tied parameters.

    Stages on the same rank send no messages to each other.
    """
    if case.pp == 1:
        return []
    own_stages, last = case.get_stages(rank), case.last_stage
    on = sum(stage < last and stage + 1 not in own_stages for stage in own_stages)
    back = sum(stage > 0 and stage - 1 not in own_stages for stage in own_stages)
    hidden = case.stream_tokens * case.width * case.bytes.compute
    m, what = case.microbatches, "hidden states and gradients"
    traffic = [Sent(("pp",), what, m * on, m * on * hidden, None, "send", "F", False)]
    traffic.append(Sent(("pp",), what, m * back, m * back * hidden, None, "send", "B", False))
    for array in case.list_held(rank):
        owns = rank == get_owner_rank(case, array)
        if not all(stage in own_stages for stage in array.stages) and (owns or array.trained):
            numbers = memory.count_state_numbers(case, array)  # tied: owner sends weights, copy sends gradients
            nbytes = memory.count_stored_bytes(case, array.group) if owns else case.bytes.gradient
            traffic.append(Sent(("pp",), "tied embedding", 1, numbers * nbytes, None, "send", "end"))
    return traffic


# --- data ------------------------------------------------------------------------------------------------------------


def _sum_shards(case: Case, axes: tuple[str, ...], shards: int, size: int, plain: bool) -> Sent:
    """Return the traffic of the reduction of `size` gradients over the `shards` ranks that share a group's state.

    plain: whether the reduction is a plain sum, and not the run's gradient reduction
    """
    scatters, wire = case.config.zero > 0, case.bytes.wire
    ring, own = count_ring_bytes(size * wire, shards, scatters), case.gradients.count_sent(size, shards, scatters, wire)
    calls = case.microbatches if case.sums_each else 1
    operation: Operation = "reduce_scatter" if scatters else "all_reduce"
    when: When = "B" if case.sums_each else "end"
    return Sent(axes, "gradients", calls, int(calls * (ring if plain else own)), None, operation, when, False)


def _is_whole_on(case: Case, array: Array, rank: int) -> bool:
    """Return whether a parameter is tied and all modules that share it are on the pipeline rank `rank`."""
    return any(owner == array.name for _, owner in case.plan.tied) and set(array.stages) <= set(case.get_stages(rank))


def list_data_traffic(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of ZeRO (arXiv 1910.02054, section 7) between data ranks, by parameter group.

    ZeRO stage 0 all-reduces the gradients. Stages 1 to 3 reduce-scatter the gradients, stages 2 and 3 after every
    microbatch. Stages 1 and 2 all-gather the new weights once a step. Stage 3 all-gathers the weights for each forward
    and backward pass of a module, except for backward passes that start right after the forward pass. Replicas
    all-reduce their sums once a step. Compressed gradients are counted as after the warm-up. Arrays of a fold
    are sharded by ZeRO over the ranks that hold the same shard of the fold; their replicas are along the other axes.
    """
    zero, wire = case.config.zero, case.bytes.wire
    # modules whose weights are gathered again for the backward pass: blocks, and a tied embedding that the head reads
    twice: set[int | str] = set(case.list_blocks(rank))
    if case.last_stage in case.get_stages(rank) and case.config.prefetch:
        twice -= set(case.list_blocks(rank)[-case.config.prefetch :])  # stay gathered until the backward pass
    twice |= {array.group.place for array in case.list_arrays(EMBED) if _is_whole_on(case, array, rank)}
    traffic: list[Sent] = []
    for group, size in memory.count_group_numbers(case, rank).items():
        shards, copies = group.shards, group.copies
        axes, replicas = _get_group_axes(case, group)
        weights = size * memory.count_weight_bytes(case, group)
        if shards > 1 and group.kind.trained:  # compressed only without replicas, else between the replicas
            traffic.append(_sum_shards(case, axes, shards, size, plain=copies > 1))
        if shards > 1 and zero:
            ahead = case.config.prefetch > 0
            if zero < 3:
                traffic.append(gather(axes, "weights", shards, 1, weights, "update", not ahead))
            else:
                traffic.append(gather(axes, "weights", shards, case.microbatches, weights, "F", not ahead))
                if group.place in twice:
                    traffic.append(gather(axes, "weights", shards, case.microbatches, weights, "B", not ahead))
        if copies > 1 and group.kind.trained:
            nbytes = int(case.gradients.count_sent(size // shards, copies, False, wire))
            traffic.append(Sent(replicas, "gradients", 1, nbytes, None, "all_reduce", "end", False))
    return traffic


# --- optimizer -------------------------------------------------------------------------------------------------------


def list_optimizer_traffic(case: Case, rank: int) -> list[Sent]:
    """Return the traffic of an optimizer that maps full matrices (Muon): shards to each matrix's owner, results back.

    The traffic of ranks differs; the result is the average over the ranks of pipeline rank `rank`.
    """
    mesh, names = case.mesh, [array.name for array in case.list_held(rank) if array.matrix and array.trained]
    axes = tuple(axis for axis in mesh.axes if axis != "pp" and mesh.size(axis) > 1)
    if not case.optimizer.maps_matrices() or not axes or not names:
        return []
    ranks = mesh.group(mesh.rank({"pp": rank}), axes)
    return [
        Sent(
            axes,
            "optimizer matrices",
            2,
            numbers * case.bytes.master // len(ranks),
            None,
            "all_to_all",
            "update",
        )
        for numbers in list_matrix_traffic(case.registry, names, ranks)
    ]


def _get_group_axes(case: Case, group: ParamGroup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (axes of the ranks that share a group's state, axes of its replicas), without axes of one rank."""
    ranks = StateRanks.of(case.plan, case.mesh, group.kind.fold)
    shard_axes = (f"{BESIDE}{ranks.fold.name}",) if ranks.fold else _select_several(case, SHARD_AXES)
    return shard_axes, _select_several(case, ranks.replica_axes)


def _select_several(case: Case, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes in `axes` that have more than one rank."""
    return tuple(axis for axis in axes if case.mesh.size(axis) > 1)
