"""Memory of a rank by kind, in bytes: weights, gradients, optimizer state (Rajbhandari et al., ZeRO, arXiv 1910.02054,
section 3), activations of the micro-batches under way, logits, buffers.
"""

from __future__ import annotations

from collections import Counter

from gangline_parallel_megatron_style.layout import activations
from gangline_parallel_megatron_style.layout.activations import Rates
from gangline_parallel_megatron_style.layout.case import Case
from gangline_parallel_megatron_style.layout.parameters import Array, Unit
from gangline_parallel_megatron_style.pipeline.actions import Schedule


def state(case: Case, rank: int) -> Counter[str]:
    """Weights, gradients, master weights and optimizer state of a rank.

    zero 0: all whole. 1: master weights and optimizer state cut over the shard ranks. 2: gradients too, but for those
    of the blocks whose backward pass is under way (and not where deterministic sums want all of them). 3: weights too,
    but for those of the modules in use. What lies on a fold that leaves no rank beside it is cut by the fold alone.
    Offloaded, masters and optimizer state are in the host's memory. Where the forward pass computes in the masters' own
    dtype, whole weights are the masters.
    """
    held, width = case.held(rank), case.bytes
    found: Counter[str] = Counter()
    found["weights"] = gathered(case, rank)
    under_way: Counter[int | str] = Counter()  # gradients that are cut, while they are whole
    for array in held:
        cut, part = array.shards > 1, part_of(case, array)
        whole_is_master = weight_bytes(case, array.unit) == width.master and not releases(case, array.unit)
        if not whole_is_master and not case.config.offload:
            found["master weights"] += part * width.master
        if not releases(case, array.unit):
            found["weights"] += array.size * weight_bytes(case, array.unit)
        if case.sums_each and cut:
            under_way[array.unit.place] += array.size
            found["gradients"] += part * width.gradient
        else:
            found["gradients"] += array.size * width.gradient
        if not case.config.offload:
            states = case.matrix_states if array.matrix else case.other_states
            found["optimizer state"] += part * states * width.master
    found["gradients"] += 2 * max(under_way.values(), default=0) * width.gradient
    if case.config.compress == "onebit":
        numbers = (errors(case, unit, size) for unit, size in units(case, rank).items())
        found["errors of compression"] = sum(numbers) * width.wire
    return found


def errors(case: Case, unit: Unit, numbers: int) -> int:
    """What error feedback keeps: of all that a rank sends compressed, and of the sums that it hands round."""
    if unit.copies > 1:
        sent = numbers // unit.shards
        return sent + sent // unit.copies
    if unit.shards == 1:
        return 0
    return numbers + (numbers // unit.shards if case.config.zero == 0 else 0)


def part_of(case: Case, array: Array) -> int:
    """Numbers of a parameter whose state is on one rank."""
    return array.part if case.config.zero else array.size


def weight_bytes(case: Case, unit: Unit) -> int:
    """Bytes of one of the numbers that a unit computes with."""
    return case.bytes.master if unit.full else case.bytes.compute


def releases(case: Case, unit: Unit) -> bool:
    """Whether a unit's weights are whole only while its module is in use."""
    return case.config.zero == 3 and unit.shards > 1


def units(case: Case, rank: int) -> Counter[Unit]:
    """Numbers of each unit that is gathered and reduced in one piece, in the order of the model."""
    found: Counter[Unit] = Counter()
    for array in case.held(rank):
        found[array.unit] += array.size
    return found


def gathered(case: Case, rank: int) -> int:
    """Bytes of the weights that come and go, at most: those of the module in use and of the modules gathered ahead."""
    sizes: Counter[int | str] = Counter()
    for unit, size in units(case, rank).items():
        sizes[unit.place] += size * weight_bytes(case, unit) if releases(case, unit) else 0
    each, window = list(sizes.values()), 1 + case.config.prefetch
    return max((sum(each[start : start + window]) for start in range(len(each))), default=0)


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
    """What comes and goes within a module: the hidden states of all tokens that tp gathers and scatters, the gradients
    of one module's own matrices before they are added to the others, and a unit of gradients where the wire has another
    dtype.
    """
    width = case.bytes
    at_once: Counter[str] = Counter()
    for array in case.held(rank):
        if array.matrix:
            at_once[array.name.rpartition(".")[0]] += array.size
    found = max(at_once.values(), default=0)
    found *= width.compute + (width.gradient if width.compute != width.gradient else 0)
    if case.tp > 1:
        found += 3 * case.tokens * case.width * width.compute  # what goes in, its gradient, and a term of that
    largest = max((size for unit, size in units(case, rank).items() if unit.shards * unit.copies > 1), default=0)
    return found + (largest * width.wire if width.wire != width.gradient else 0)


def of_rank(case: Case, rank: int, schedule: Schedule | None, gpu: bool = True) -> Counter[str]:
    """Kind -> bytes for a rank of pipeline rank `rank`, at the moment when most is needed."""
    rates = Rates.of(case, gpu)
    found = state(case, rank)
    found["activations"] = under_way(case, rank, schedule, rates) + recomputing(case, rank, rates)
    if case.last_stage in case.stages_of(rank):
        found["logits"] = activations.head(case, rates)["logits"]
    found["buffers"] = buffers(case, rank)
    return found
