"""Traffic of a rank along tp: on entry and exit of regions of blocks, in the embedding, and in the loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from gangline.config import Recompute
from gangline.model.linear_nodes import EmbeddingNode
from gangline.model.tree import Node, WrapNode, iterate_nodes
from gangline.shard import name_model_array
from gangline_basics.explain.activations import list_beside_head
from gangline_basics.model.decoder_nodes import HeadNode
from gangline_parallel_megatron_style.cost import memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import Sent, gather, reduce
from gangline_parallel_megatron_style.cost.parameters import Array
from gangline_parallel_megatron_style.sharding.arrays import EMBED
from gangline_parallel_megatron_style.sharding.ranks import SHARD_AXES


@dataclass
class RegionTraffic:
    """A module whose linears tp shards: linears sharded by outputs enter the region, those sharded by inputs leave it.

    enters       width of the input that is gathered on entry; 0: no entry
    leaves       width of the output that is summed on exit; 0: no exit
    needs_input  whether a weight that multiplies the input is trained, so that the backward pass needs the input
    needs_grad   whether the input needs a gradient
    """

    enters: int = 0
    leaves: int = 0
    needs_input: bool = False
    needs_grad: bool = True


def get_regions(case: Case, index: int) -> dict[str, RegionTraffic]:
    """Return the tensor-parallel regions of a block, by the path of their module, in order.

    A linear is in the region of its parent module; a wrapper of a linear has a separate region.
    """
    key = ("regions", case.get_kind(index)[0], index > 0)
    if key not in case.known:
        case.known[key] = _find_block_regions(case, index)
    regions: dict[str, RegionTraffic] = case.known[key]
    return regions


def group_kinds(case: Case, blocks: Iterable[int]) -> list[tuple[int, int]]:
    """Return (block, number of blocks in `blocks` with equal traffic), in order; block 0 of the model is separate."""
    count: dict[object, list[int]] = {}
    for index in blocks:
        count.setdefault((*case.get_kind(index), index > 0), []).append(index)
    return [(same[0], len(same)) for same in count.values()]


def _find_block_regions(case: Case, index: int) -> dict[str, RegionTraffic]:
    needs_grad = index > 0 or any(array.trained for array in case.list_arrays(EMBED))
    return _find_regions(case, case.blocks[index], f"{case.plan.blocks}.{index}", needs_grad)


def _find_regions(case: Case, block: Node, at: str, needs_grad: bool = True) -> dict[str, RegionTraffic]:
    regions: dict[str, RegionTraffic] = {}
    for path, node in iterate_nodes(block, at):
        for name, shape in node.get_shapes().items():
            full = f"{path}.{name}"
            rule, trained = case.plan.get_shard_rules(full, len(shape)).get("tp"), not case.plan.is_frozen(full)
            if rule is None or len(shape) < 2:
                needs_grad |= trained and not regions
                continue
            region = regions.setdefault(full.rsplit(".", 2)[0], RegionTraffic(needs_grad=needs_grad or bool(regions)))
            if rule.dim == 0:
                region.enters = shape[1]
                region.needs_input |= trained
            else:
                region.leaves = shape[0]
    return regions


def list_tensor_traffic(case: Case, rank: int) -> list[Sent]:
    """Return the traffic along tp (arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198, section 4.2.2).

    A region with sequence parallelism, forward: all-gather on entry, reduce-scatter on exit. Backward: all-gather of
    the output's gradient, all-gather of the input for the weight gradients, reduce-scatter of the input's gradient.
    A region without sequence parallelism: one all-reduce forward and one backward. A recomputed block runs forward
    twice, the second time without its last collective.
    """
    if case.tp == 1:
        return []
    traffic = list[Sent]()
    for stage in case.get_stages(rank):
        for index, alike in group_kinds(case, case.stages[stage]):
            traffic += _list_block_traffic(case, get_regions(case, index), alike, case.is_recomputed(index))
        if stage == case.last_stage:
            for path, node in case.head_blocks.items():
                traffic += _list_block_traffic(case, _find_regions(case, node, path), 1, case.is_recomputed(path))
        traffic += _list_end_traffic(case, stage, case.tokens * case.bytes.compute * case.width)
    for ranks, numbers in _count_summed(case, rank).items():
        traffic.append(
            reduce(("tp",), "gradients of replicated parameters", ranks, 1, numbers * case.bytes.gradient, "end")
        )
    return traffic


def _list_block_traffic(case: Case, own: dict[str, RegionTraffic], alike: int, recomputed: bool) -> list[Sent]:
    """Return the traffic along tp of `alike` equal blocks with the regions `own`."""
    axes, n, sharded, m, traffic = ("tp",), case.tp, case.sequence_parallel, case.microbatches * alike, list[Sent]()
    of_one = case.tokens * case.bytes.compute  # bytes of one feature of all tokens
    send, there, back = gather if sharded else reduce, "hidden states in blocks", "gradients in blocks"
    passes = 2 if recomputed and case.recompute is Recompute.full else 1
    for path, region in own.items():
        last = path == next(reversed(own)) and not isinstance(case.by_path[path], WrapNode)
        if region.leaves:
            recomputations = passes - 1 - (1 if last and passes > 1 else 0)
            traffic.append(send(axes, there, n, m, of_one * region.leaves))
            traffic.append(send(axes, there, n, m * recomputations, of_one * region.leaves, "B"))
            if sharded:
                traffic.append(send(axes, back, n, m, of_one * region.leaves, "B"))
        if region.enters and sharded:
            traffic.append(send(axes, there, n, m, of_one * region.enters))
            traffic.append(send(axes, there, n, m * (passes - 1), of_one * region.enters, "B"))
        if region.enters and region.needs_grad:  # overlaps with dW: `tensor.crossing.Enter`
            calls = m * (1 + (sharded and region.needs_input))
            traffic.append(send(axes, back, n, calls, of_one * region.enters, "B", not region.needs_input))
    return traffic


def _count_summed(case: Case, rank: int) -> dict[int, int]:
    """Return number of neighbouring tp ranks -> number of gradient elements that these ranks sum.

    With blocks inside the head, ZeRO shards the rows of large matrices unevenly. Then the result is for the rank with
    the most elements.
    """
    places: list[tuple[int | str, int]] = [("embed", 1), *group_kinds(case, case.list_blocks(rank)), ("head", 1)]
    counts: Counter[int] = Counter()
    for array, alike in ((array, alike) for place, alike in places for array in case.list_arrays(place)):
        if array.sums > 1 and array.trained and rank == get_owner_rank(case, array):
            counts[array.sums] += alike * memory.count_state_numbers(case, array)
    in_head = any(
        array.sums > 1 and len(array.shape) > 1 for array in case.list_arrays("head")
    ) and case.last_stage in (case.get_stages(rank))
    if not case.config.zero or case.shards == 1 or not in_head:
        return counts
    arrays = [
        array
        for array in case.list_held(rank)
        if array.sums > 1 and array.trained and rank == get_owner_rank(case, array)
    ]
    each = []
    for one in case.mesh.group(case.mesh.rank({"pp": rank}), SHARD_AXES):
        each.append(Counter[int]())
        for array in arrays:
            boxes = case.registry.list_rank_boxes(name_model_array(array.name), one)
            each[-1][array.sums] += sum(prod(box.shape) for box, _ in boxes)
    return max(each, key=lambda numbers: numbers.total())


def get_owner_rank(case: Case, array: Array) -> int:
    """Return the pipeline rank that owns a parameter; for a tied parameter the first rank that has it."""
    return case.rank_of[array.stages[0]]


def _list_end_traffic(case: Case, stage: int, hidden: int) -> list[Sent]:
    """Return the tp traffic of all embeddings and losses of a stage whose vocabulary tp shards (MTP heads too).

    hidden: bytes of the hidden state of all tokens
    """
    n, last, traffic = case.tp, stage == case.last_stage, list[Sent]()
    beside = list_beside_head(case.by_path[case.plan.head], case.plan.head) if last else []
    lookups = [case.plan.embed] * (stage == 0) + [at for at, node in beside if isinstance(node, EmbeddingNode)]
    losses = [case.plan.head] * last + [at for at, node in beside if isinstance(node, HeadNode)]
    for path in lookups:
        if "tp" in case.plan.get_shard_rules(f"{path}.weight", 2):
            traffic += _list_lookup_traffic(case, hidden, not case.plan.is_frozen(f"{path}.weight"))
    for path in losses:
        if "tp" in case.plan.get_shard_rules(f"{path}.weight", 2):
            traffic.append(
                gather(("tp",), "loss", n, case.microbatches, 2 * n * case.tokens * max(4, case.bytes.compute))
            )
            traffic += _list_loss_traffic(case, hidden, not case.plan.is_frozen(f"{path}.weight"))
    return traffic


def _list_lookup_traffic(case: Case, hidden: int, trained: bool) -> list[Sent]:
    """Return the tp traffic of an embedding lookup. `hidden`: bytes of the hidden state of all tokens."""
    send = gather if case.sequence_parallel else reduce
    traffic = [send(("tp",), "embedding", case.tp, case.microbatches, hidden)]
    if case.sequence_parallel and trained:
        traffic.append(send(("tp",), "embedding", case.tp, case.microbatches, hidden, "B"))
    return traffic


def _list_loss_traffic(case: Case, hidden: int, trained: bool) -> list[Sent]:
    if not case.sequence_parallel:
        return [reduce(("tp",), "loss", case.tp, case.microbatches, hidden, "B", False)]
    there = gather(("tp",), "loss", case.tp, case.microbatches, hidden)
    return [there, gather(("tp",), "loss", case.tp, (1 + trained) * case.microbatches, hidden, "B", False)]
