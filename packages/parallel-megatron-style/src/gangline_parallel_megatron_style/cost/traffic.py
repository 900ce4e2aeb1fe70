"""What a rank sends in a step, by axis: messages and bytes.

A gather of X bytes in all over n ranks makes each send X (n - 1) / n, and so does the sum that scatters them; a sum
that all ranks get is both (rings; Thakur, Rabenseifner and Gropp 2005, sections 4.1 to 4.4). `calls` counts
collectives, or for a pipeline messages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from math import gcd, prod

from gangline.config import Recompute
from gangline.explain import Operation, When, beside_head
from gangline.model import AttentionNode, EmbeddingNode, HeadNode, Node, WrapNode, nodes
from gangline.strategy import matrix_traffic, model_array
from gangline_parallel_megatron_style.cost import memory
from gangline_parallel_megatron_style.cost.case import Case
from gangline_parallel_megatron_style.cost.links import BESIDE, Sent
from gangline_parallel_megatron_style.cost.parameters import Array, ParamGroup
from gangline_parallel_megatron_style.data_parallel.compressed_bytes import WIRE
from gangline_parallel_megatron_style.sharding.arrays import EMBED
from gangline_parallel_megatron_style.sharding.ranks import SHARD_AXES, StateRanks


def of_rank(case: Case, rank: int) -> list[Sent]:
    """Everything that a rank of pipeline rank `rank` sends in a step, one entry for each (axes, purpose)."""
    return _merged(timed(case, rank), lambda sent: (sent.axes, sent.purpose))


def timed(case: Case, rank: int) -> list[Sent]:
    """The same apart by operation, by when it happens, and by whether anything waits for it."""
    parts = (tensor, context, folds, pipeline, data, matrices)
    sent = (sent for part in parts for sent in part(case, rank))
    return _merged(sent, lambda sent: (sent.axes, sent.purpose, sent.operation, sent.when, sent.waits, sent.among))


def _merged(all_sent: Iterable[Sent], key: Callable[[Sent], Hashable]) -> list[Sent]:
    found: dict[Hashable, Sent] = {}
    for sent in all_sent:
        found[key(sent)] = found[key(sent)] + sent if key(sent) in found else sent
    return [sent for sent in found.values() if sent.calls]


def _gather(
    axes: tuple[str, ...], purpose: str, ranks: int, calls: int, nbytes: int, when: When = "F", waits: bool = True
) -> Sent:
    """`calls` gathers (or scattering sums) that come to `nbytes` in all each time."""
    return Sent(axes, purpose, calls, calls * nbytes * (ranks - 1) // ranks, None, "all_gather", when, waits)


def _reduce(
    axes: tuple[str, ...], purpose: str, ranks: int, calls: int, nbytes: int, when: When = "F", waits: bool = True
) -> Sent:
    return Sent(axes, purpose, calls, 2 * calls * nbytes * (ranks - 1) // ranks, None, "all_reduce", when, waits)


def _scatter(axes: tuple[str, ...], purpose: str, ranks: int, calls: int, nbytes: int, when: When) -> Sent:
    """Sums of gradients that ranks keep a part of: beside the backward pass of the module before."""
    return Sent(axes, purpose, calls, calls * nbytes * (ranks - 1) // ranks, None, "reduce_scatter", when, False)


# --- tp --------------------------------------------------------------------------------------------------------------


@dataclass
class RegionTraffic:
    """A module of a block whose products tp cuts, entered by those cut by outputs and left by those cut by inputs.

    enters, leaves  how wide what is gathered or summed there is; 0: not at all
    needs_input     whether a weight that its input is multiplied with is trained, so that the input is needed again
    needs_grad      whether its input needs a gradient
    """

    enters: int = 0
    leaves: int = 0
    needs_input: bool = False
    needs_grad: bool = True


def regions(case: Case, index: int) -> dict[str, RegionTraffic]:
    """The regions of a block by the path of their module, in order. A linear is in the region of the module around it,
    and what wraps a linear has one of its own.
    """
    key = ("regions", case.kind(index)[0], index > 0)
    if key not in case.known:
        case.known[key] = _regions(case, index)
    found: dict[str, RegionTraffic] = case.known[key]
    return found


def of_kinds(case: Case, blocks: Iterable[int]) -> list[tuple[int, int]]:
    """(a block, how many of these send what it does), in order; the first block of the model stands alone."""
    count: dict[object, list[int]] = {}
    for index in blocks:
        count.setdefault((*case.kind(index), index > 0), []).append(index)
    return [(same[0], len(same)) for same in count.values()]


def _regions(case: Case, index: int) -> dict[str, RegionTraffic]:
    needs_grad = index > 0 or any(array.trained for array in case.at(EMBED))
    return _regions_of(case, case.blocks[index], f"{case.plan.blocks}.{index}", needs_grad)


def _regions_of(case: Case, block: Node, at: str, needs_grad: bool = True) -> dict[str, RegionTraffic]:
    found: dict[str, RegionTraffic] = {}
    for path, node in nodes(block, at):
        for name, shape in node.shapes().items():
            full = f"{path}.{name}"
            cut, trained = case.plan.cuts_of(full, len(shape)).get("tp"), not case.plan.is_frozen(full)
            if cut is None or len(shape) < 2:
                needs_grad |= trained and not found
                continue
            region = found.setdefault(full.rsplit(".", 2)[0], RegionTraffic(needs_grad=needs_grad or bool(found)))
            if cut.dim == 0:
                region.enters = shape[1]
                region.needs_input |= trained
            else:
                region.leaves = shape[0]
    return found


def tensor(case: Case, rank: int) -> list[Sent]:
    """arXiv 1909.08053, section 3, and with sequence parallelism arXiv 2205.05198, section 4.2.2.

    A region with sequence parallelism, forward: all-gather when entered, reduce-scatter when left. Backward: all-gather
    of its gradient, all-gather of its input for the weights' gradients, reduce-scatter of the input's gradient. Without
    sequence parallelism: one all-reduce forward and one backward. A recomputed block runs forward twice, without its
    last collective.
    """
    if case.tp == 1:
        return []
    found = list[Sent]()
    for stage in case.stages_of(rank):
        for index, alike in of_kinds(case, case.stages[stage]):
            found += _block(case, regions(case, index), alike, case.recomputed(index))
        if stage == case.last_stage:
            for path, node in case.head_blocks.items():
                found += _block(case, _regions_of(case, node, path), 1, case.recomputed(path))
        found += _ends(case, stage, case.tokens * case.bytes.compute * case.width)
    for ranks, numbers in _summed(case, rank).items():
        found.append(_reduce(("tp",), "gradients of what is whole", ranks, 1, numbers * case.bytes.gradient, "end"))
    return found


def _block(case: Case, own: dict[str, RegionTraffic], alike: int, recomputed: bool) -> list[Sent]:
    """Of so many blocks with these regions."""
    axes, n, cut, m, found = ("tp",), case.tp, case.sequence_parallel, case.microbatches * alike, list[Sent]()
    of_one = case.tokens * case.bytes.compute  # bytes of all tokens, for a width of 1
    send, there, back = _gather if cut else _reduce, "hidden in blocks", "gradients of blocks"
    passes = 2 if recomputed and case.recompute is Recompute.full else 1
    for path, region in own.items():
        last = path == next(reversed(own)) and not isinstance(case.by_path[path], WrapNode)
        if region.leaves:
            again = passes - 1 - (1 if last and passes > 1 else 0)
            found.append(send(axes, there, n, m, of_one * region.leaves))
            found.append(send(axes, there, n, m * again, of_one * region.leaves, "B"))
            if cut:
                found.append(send(axes, back, n, m, of_one * region.leaves, "B"))
        if region.enters and cut:
            found.append(send(axes, there, n, m, of_one * region.enters))
            found.append(send(axes, there, n, m * (passes - 1), of_one * region.enters, "B"))
        if region.enters and region.needs_grad:  # beside the products: `tensor.crossing.Enter`
            calls = m * (1 + (cut and region.needs_input))
            found.append(send(axes, back, n, calls, of_one * region.enters, "B", not region.needs_input))
    return found


def _summed(case: Case, rank: int) -> dict[int, int]:
    """Neighbours along tp -> how many gradients a rank adds over them. Beside blocks inside the head there are large
    matrices, whose rows lie on ranks as they fit: then those of the rank that has most.
    """
    arrays = [a for a in case.held(rank) if a.sums > 1 and a.trained and rank == home(case, a)]
    found: Counter[int] = Counter()
    for array in arrays:
        found[array.sums] += memory.part_of(case, array)
    in_head = any(array.group.place == "head" and len(array.shape) > 1 for array in arrays)
    if not case.config.zero or case.shards == 1 or not in_head:
        return found
    each = []
    for one in case.mesh.group(case.mesh.rank({"pp": rank}), SHARD_AXES):
        each.append(Counter[int]())
        for array in arrays:
            boxes = case.registry.of_rank(model_array(array.name), one)
            each[-1][array.sums] += sum(prod(box.shape) for box, _ in boxes)
    return max(each, key=lambda numbers: numbers.total())


def home(case: Case, array: Array) -> int:
    """The pipeline rank that owns a parameter: of a tied one the first that has it."""
    return case.rank_of[array.stages[0]]


def _ends(case: Case, stage: int, hidden: int) -> list[Sent]:
    """The embedding and the loss, whose vocabulary is cut; those beside the head, too."""
    n, last, found = case.tp, stage == case.last_stage, list[Sent]()
    beside = beside_head(case.by_path[case.plan.head], case.plan.head) if last else []
    lookups = [case.plan.embed] * (stage == 0) + [at for at, node in beside if isinstance(node, EmbeddingNode)]
    losses = [case.plan.head] * last + [at for at, node in beside if isinstance(node, HeadNode)]
    for path in lookups:
        if "tp" in case.plan.cuts_of(f"{path}.weight", 2):
            found += _lookup(case, hidden, not case.plan.is_frozen(f"{path}.weight"))
    for path in losses:
        if "tp" in case.plan.cuts_of(f"{path}.weight", 2):
            found.append(
                _gather(("tp",), "loss", n, case.microbatches, 2 * n * case.tokens * max(4, case.bytes.compute))
            )
            found += _loss(case, hidden, not case.plan.is_frozen(f"{path}.weight"))
    return found


def _lookup(case: Case, hidden: int, trained: bool) -> list[Sent]:
    """hidden: bytes of that of all tokens."""
    send = _gather if case.sequence_parallel else _reduce
    found = [send(("tp",), "embedding", case.tp, case.microbatches, hidden)]
    if case.sequence_parallel and trained:
        found.append(send(("tp",), "embedding", case.tp, case.microbatches, hidden, "B"))
    return found


def _loss(case: Case, hidden: int, trained: bool) -> list[Sent]:
    if not case.sequence_parallel:
        return [_reduce(("tp",), "loss", case.tp, case.microbatches, hidden, "B", False)]
    there = _gather(("tp",), "loss", case.tp, case.microbatches, hidden)
    return [there, _gather(("tp",), "loss", case.tp, (1 + trained) * case.microbatches, hidden, "B", False)]


# --- cp --------------------------------------------------------------------------------------------------------------


def context(case: Case, rank: int) -> list[Sent]:
    """Ring (arXiv 2310.01889, section 3): keys and values go round the ranks, and in the backward pass their gradients
    behind them.

    Ulysses (arXiv 2309.14509, section 3): queries, keys and values change hands, then the output, and their gradients.
    """
    if case.cp == 1:
        return []
    found = []
    blocks = [(case.blocks[i], case.recomputed(i), alike) for i, alike in of_kinds(case, case.blocks_of(rank))]
    if case.last_stage in case.stages_of(rank):
        blocks += [(block, case.recomputed(path), 1) for path, block in case.head_blocks.items()]
    for block, recomputed, alike in blocks:
        again = 1 if recomputed else 0
        for _, node in nodes(block):
            if isinstance(node, AttentionNode):
                sent = _ulysses if case.config.context == "ulysses" else _ring
                ring, m = sent is _ring, case.microbatches * alike
                operation: Operation = "send" if ring else "all_to_all"
                (calls, nbytes), (first, firsts) = sent(case, node, again), _forward(case, node)
                ways: tuple[tuple[int, int, When], ...] = ((first, firsts, "F"), (calls - first, nbytes - firsts, "B"))
                for count, size, when in ways:
                    found.append(Sent(("cp",), "attention", m * count, m * size, None, operation, when, not ring))
    if gathers := sum(_positions(case, stage) for stage in case.stages_of(rank)):
        found.append(_gather(("cp",), "positions", case.cp, case.microbatches * gathers, 8 * case.tokens * case.cp))
    return found


def _positions(case: Case, stage: int) -> int:
    """How often a microbatch gathers them: once for all layers; the ring does it for each kind of window."""
    if case.config.context == "ulysses":
        return 1
    kinds = {case.model.kinds[index] for index in case.stages[stage]}
    inside = [node for index in kinds for _, node in nodes(case.blocks[index])]
    return len({node.call for node in inside if isinstance(node, AttentionNode) and node.window is not None})


def _forward(case: Case, node: AttentionNode) -> tuple[int, int]:
    """(messages, bytes) of one microbatch on its way forward: half of Ulysses', one round of the ring's."""
    if case.config.context == "ulysses":
        calls, nbytes = _ulysses(case, node, 0)
        return calls // 2, nbytes // 2
    (calls, nbytes), (fewer, less) = _ring(case, node, 0), _ring(case, node, -1)
    return calls - fewer, nbytes - less


def _ring(case: Case, node: AttentionNode, again: int) -> tuple[int, int]:
    """(messages, bytes) of one microbatch: gradients travel in float32 at least, and one step further, home."""
    numbers = 2 * case.tokens * max(1, node.kv_heads // case.tp) * node.head_dim
    rounds = (2 + again) * (case.cp - 1)
    return rounds + case.cp, numbers * (rounds * case.bytes.compute + case.cp * max(4, case.bytes.compute))


def _ulysses(case: Case, node: AttentionNode, again: int) -> tuple[int, int]:
    """(all-to-alls, bytes) of one microbatch; key heads that do not divide are repeated.

    Where attention alone is recomputed, that ends before the output changes hands: nothing behind it is needed again.
    """
    heads, key_heads = node.heads // case.tp, max(1, node.kv_heads // case.tp)
    key_heads *= case.cp // gcd(case.cp, key_heads)
    numbers = case.tokens * node.head_dim * (2 * heads + 2 * key_heads)
    passes = 2 + again
    ends_early = again if case.recompute is Recompute.selective else 0
    total = passes * numbers - ends_early * case.tokens * node.head_dim * heads
    return 2 * passes - ends_early, total * case.bytes.compute * (case.cp - 1) // case.cp


# --- folds -----------------------------------------------------------------------------------------------------------


def folds(case: Case, rank: int) -> list[Sent]:
    """What modules on a fold send over it, as their nodes say; a recomputed block runs forward twice."""
    found = []
    for stage in case.stages_of(rank):
        ends = [case.plan.embed] * (stage == 0) + [case.plan.head] * (stage == case.last_stage)
        parts = [(case.by_path[part], part, 1, 1) for part in ends]
        full = case.recompute is Recompute.full
        for index, alike in of_kinds(case, case.stages[stage]):
            parts.append((case.blocks[index], "", 2 if full and case.recomputed(index) else 1, alike))
        twice = [f"{path}." for path in case.head_blocks if full and case.recomputed(path)]
        for part, path, once, alike in parts:
            for at, node in nodes(part, path):
                passes = 2 if any(at.startswith(block) for block in twice) else once
                for volume in node.communication_volume(case.sizes):
                    (calls, nbytes), (back_calls, back) = volume.forward, volume.backward
                    m, fold, waits = (
                        case.microbatches * alike,
                        (volume.fold,),
                        not case.config.overlaps(case.plan, case.mesh),
                    )
                    found.append(Sent(fold, volume.what, m * calls, m * nbytes, volume.among, "all_to_all", "F", waits))
                    calls, nbytes = (passes - 1) * calls + back_calls, (passes - 1) * nbytes + back
                    found.append(Sent(fold, volume.what, m * calls, m * nbytes, volume.among, "all_to_all", "B", waits))
    return found


# --- pp --------------------------------------------------------------------------------------------------------------


def pipeline(case: Case, rank: int) -> list[Sent]:
    """Hidden to the next stage, its gradient to the one before, where that lies on another rank."""
    if case.pp == 1:
        return []
    mine, last = case.stages_of(rank), case.last_stage
    on = sum(stage < last and stage + 1 not in mine for stage in mine)
    back = sum(stage > 0 and stage - 1 not in mine for stage in mine)
    hidden = case.stream_tokens * case.width * case.bytes.compute
    m, what = case.microbatches, "hidden and gradients"
    found = [Sent(("pp",), what, m * on, m * on * hidden, None, "send", "F", False)]
    found.append(Sent(("pp",), what, m * back, m * back * hidden, None, "send", "B", False))
    for array in case.held(rank):
        owns = rank == home(case, array)
        if not all(stage in mine for stage in array.stages) and (owns or array.trained):
            numbers = memory.part_of(case, array)  # tied: the owner sends weights, the copy gradients
            nbytes = memory.kept_bytes(case, array.group) if owns else case.bytes.gradient
            found.append(Sent(("pp",), "tied embedding", 1, numbers * nbytes, None, "send", "end"))
    return found


# --- data ------------------------------------------------------------------------------------------------------------


def _whole_on(case: Case, array: Array, rank: int) -> bool:
    """Whether a tied parameter has all its modules on one rank."""
    return any(owner == array.name for _, owner in case.plan.tied) and set(array.stages) <= set(case.stages_of(rank))


def data(case: Case, rank: int) -> list[Sent]:
    """ZeRO (arXiv 1910.02054, section 7), by parameter group: 0 sums the gradients; from 1 on a rank gets the sum of
    its part (from 2 on after every microbatch) and gathers the new weights; 3 gathers them for each pass over a module
    instead, but not again where the backward pass begins. Replicas add their sums once a step. Compressed gradients are
    those after the warm-up. What lies on a fold is shared by the ranks beside it, and its replicas are along the other
    axes.
    """
    zero, plain = case.config.zero, float(case.bytes.wire)
    between = WIRE.get(case.config.compress, plain)  # between replicas, or where there are none between shards
    # a block is used forward and backward; a tied embedding that is all on one rank is read by the head too
    twice: set[int | str] = set(case.blocks_of(rank))
    if case.last_stage in case.stages_of(rank) and case.config.prefetch:
        twice -= set(case.blocks_of(rank)[-case.config.prefetch :])  # kept from the forward to the backward pass
    twice |= {array.group.place for array in case.at(EMBED) if _whole_on(case, array, rank)}
    found: list[Sent] = []
    for group, size in memory.groups(case, rank).items():
        shards, copies = group.shards, group.copies
        axes, replicas = _axes_of(case, group)
        gradients, weights = int(size * (plain if copies > 1 else between)), size * memory.weight_bytes(case, group)
        if shards > 1 and zero == 0 and group.kind.trained:
            found.append(_reduce(axes, "gradients", shards, 1, gradients, "end", False))
        elif shards > 1 and zero:
            if group.kind.trained:
                calls = case.microbatches if case.sums_each else 1
                then: When = "B" if case.sums_each else "end"
                found.append(_scatter(axes, "gradients", shards, calls, gradients, then))
            ahead = case.config.prefetch > 0
            if zero < 3:
                found.append(_gather(axes, "weights", shards, 1, weights, "update", not ahead))
            else:
                found.append(_gather(axes, "weights", shards, case.microbatches, weights, "F", not ahead))
                if group.place in twice:
                    found.append(_gather(axes, "weights", shards, case.microbatches, weights, "B", not ahead))
        if copies > 1 and group.kind.trained:
            found.append(_reduce(replicas, "gradients", copies, 1, int(size * between) // shards, "end", False))
    return found


# --- optimizer -------------------------------------------------------------------------------------------------------


def matrices(case: Case, rank: int) -> list[Sent]:
    """What an optimizer that maps whole matrices (Muon) sends: their parts to who maps them, and back what comes of it.

    A rank's share of what the ranks of its stage send together: they do not have the same.
    """
    mesh, names = case.mesh, [array.name for array in case.held(rank) if array.matrix and array.trained]
    axes = tuple(axis for axis in mesh.axes if axis != "pp" and mesh.size(axis) > 1)
    if not case.optimizer.maps_matrices() or not axes or not names:
        return []
    ranks = mesh.group(mesh.rank({"pp": rank}), axes)
    return [
        Sent(
            axes,
            "matrices of the optimizer",
            2,
            numbers * case.bytes.master // len(ranks),
            None,
            "all_to_all",
            "update",
        )
        for numbers in matrix_traffic(case.registry, names, ranks)
    ]


def _axes_of(case: Case, group: ParamGroup) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(ranks that share a group's state, replicas of those), as axes with more than one rank."""
    ranks = StateRanks.of(case.plan, case.mesh, group.kind.fold)
    shared = (f"{BESIDE}{ranks.fold.name}",) if ranks.fold else _several(case, SHARD_AXES)
    return shared, _several(case, ranks.replica_axes)


def _several(case: Case, axes: tuple[str, ...]) -> tuple[str, ...]:
    """Those of `axes` along which there is more than one rank."""
    return tuple(axis for axis in axes if case.mesh.size(axis) > 1)
