"""Memory of a rank by kind, in bytes: weights, gradients, optimizer state (Rajbhandari et al., ZeRO, arXiv 1910.02054,
section 3), activations of the micro-batches under way, logits, buffers.
"""

from __future__ import annotations

from collections import Counter

from gangline_parallel_megatron_style.layout import activations
from gangline_parallel_megatron_style.layout.activations import Rates
from gangline_parallel_megatron_style.layout.case import Case
from gangline_parallel_megatron_style.layout.parameters import Array
from gangline_parallel_megatron_style.pipeline.actions import Schedule


def state(case: Case, rank: int) -> Counter[str]:
    """Weights, gradients, master weights and optimizer state of a rank.

    zero 0: all whole. 1: master weights and optimizer state cut over the shard ranks. 2: gradients too, but for those
    of the blocks whose backward pass is under way (and not where deterministic sums want all of them). 3: weights too,
    but for those of the modules in use. Offloaded, masters and optimizer state are in the host's memory. Where the
    forward pass computes in the masters' own dtype, whole weights are the masters.
    """
    held, width, zero = case.held(rank), case.bytes, case.config.zero
    numbers = sum(array.size for array in held)
    parts = sum(part_of(case, array) for array in held)
    states = sum(part_of(case, array) * (case.matrix_states if array.matrix else case.other_states) for array in held)
    released = zero == 3 and case.shards > 1
    found: Counter[str] = Counter()
    found["weights"] = (gathered(case, rank) if released else numbers) * width.compute
    if (width.compute != width.master or released) and not case.config.offload:
        found["master weights"] = parts * width.master
    if case.sums_each and case.shards > 1:
        found["gradients"] = (parts + 2 * max(units(case, rank).values())) * width.gradient
    else:
        found["gradients"] = numbers * width.gradient
    found["optimizer state"] = 0 if case.config.offload else states * width.master
    if case.config.compress == "onebit":
        found["errors of compression"] = errors(case, numbers) * width.wire
    return found


def errors(case: Case, numbers: int) -> int:
    """What error feedback keeps: of all that a rank sends compressed, and of the sums that it hands round."""
    copies = case.mesh.size("dp_replicate")
    if copies > 1:
        sent = numbers // case.shards
        return sent + sent // copies
    if case.shards == 1:
        return 0
    return numbers + (numbers // case.shards if case.config.zero == 0 else 0)


def part_of(case: Case, array: Array) -> int:
    """Numbers of a parameter whose state is on one rank."""
    return array.part if case.config.zero else array.size


def units(case: Case, rank: int) -> Counter[int | str]:
    """Numbers of each unit that is gathered and reduced in one piece: a block, the embedding, the head."""
    found: Counter[int | str] = Counter()
    for array in case.held(rank):
        found[array.kind if array.block is None else array.block] += array.size
    return found


def gathered(case: Case, rank: int) -> int:
    """Numbers of the weights that are whole at a time under zero=3: of the module in use and those gathered ahead."""
    sizes = list(units(case, rank).values())
    window = 1 + case.config.prefetch
    return max(sum(sizes[start : start + window]) for start in range(len(sizes)))


def under_way(case: Case, rank: int, schedule: Schedule | None, rates: Rates) -> int:
    """Bytes of activations that a rank keeps at most, over the order of its schedule."""
    sizes = []
    for stage in case.stages_of(rank):
        size = sum(activations.of_block(case, block, rates) for block in case.stages[stage])
        size += activations.angles(case, rates)
        if stage == case.last_stage:
            size += activations.head(case, rates)["activations"]
        sizes.append(size)
    if schedule is None:
        return sizes[0]
    live = most = 0
    for action in schedule.actions[rank]:
        live += {"F": 1, "I": 0, "B": -1, "W": -1}[action.kind] * sizes[action.chunk]
        most = max(most, live)
    return most


def recomputing(case: Case, rank: int, rates: Rates) -> int:
    """What a block keeps that is being computed again, on top of what was kept of it."""
    mine = [block for block in case.blocks_of(rank) if case.recomputed(block)]
    sizes = [activations.of_node(case.blocks[i], rates) - activations.of_block(case, i, rates) for i in mine]
    return max(sizes, default=0)


def buffers(case: Case, rank: int) -> int:
    """What comes and goes within a module: the hidden states of all tokens that tp gathers and scatters, the gradient
    of one matrix before it is added to the others, and a unit of gradients where the wire has another dtype.
    """
    width = case.bytes
    found = max((array.size for array in case.held(rank) if array.matrix), default=0)
    found *= width.compute + (width.gradient if width.compute != width.gradient else 0)
    if case.tp > 1:
        found += 3 * case.tokens * case.width * width.compute  # what goes in, its gradient, and a term of that
    if case.mesh.size("dp_replicate", "dp_shard", "cp") > 1:
        largest = max(units(case, rank).values())
        found += largest * case.bytes.wire if case.bytes.wire != case.bytes.gradient else 0
    return found


def of_rank(case: Case, rank: int, schedule: Schedule | None, gpu: bool = True) -> Counter[str]:
    """Kind -> bytes for a rank of pipeline rank `rank`, at the moment when most is needed."""
    rates = Rates.of(case, gpu)
    found = state(case, rank)
    found["activations"] = under_way(case, rank, schedule, rates) + recomputing(case, rank, rates)
    if case.last_stage in case.stages_of(rank):
        found["logits"] = activations.head(case, rates)["logits"]
    found["buffers"] = buffers(case, rank)
    return found
