"""Memory of a rank by kind, in bytes: weights, gradients, optimizer state (Rajbhandari et al., ZeRO, arXiv 1910.02054,
section 3), activations of the micro-batches under way, logits, buffers.
"""

from __future__ import annotations

from collections import Counter

from gangline_parallel_megatron_style.layout import activations
from gangline_parallel_megatron_style.layout.activations import Rates
from gangline_parallel_megatron_style.layout.case import Case
from gangline_parallel_megatron_style.pipeline.actions import Schedule


def state(case: Case, rank: int) -> Counter[str]:
    """Weights, gradients, master weights and optimizer state of a rank.

    zero 0: all whole. 1: master weights and optimizer state cut over the shard ranks. 2: gradients too. 3: the weights
    that the forward pass reads too, of which the units in use are gathered. Where the forward pass computes in the
    master's own dtype, whole weights are the masters.
    """
    held, width = case.held(rank), case.bytes
    numbers = sum(array.size for array in held)
    states = sum(array.size * (case.matrix_states if array.matrix else case.other_states) for array in held)
    shards = case.shards
    zero = case.config.zero if shards > 1 else 0
    part = -(-numbers // shards)
    found: Counter[str] = Counter()
    copied = width.compute != width.master
    if zero == 3:
        found["weights"] = part * width.compute * copied + gathered(case, rank) * width.compute
    else:
        found["weights"] = numbers * width.compute
    found["gradients"] = (part if zero >= 2 else numbers) * width.gradient
    if copied or zero == 3:
        found["master weights"] = (part if zero else numbers) * width.master
    if not case.config.offload:
        found["optimizer state"] = -(-states // (shards if zero else 1)) * width.master
    return found


def units(case: Case, rank: int) -> list[int]:
    """Numbers of each unit that zero=3 gathers at once on a rank: a block, the embedding, the head."""
    found: Counter[int | str] = Counter()
    for array in case.held(rank):
        found[array.kind if array.block is None else array.block] += array.size
    return list(found.values())


def gathered(case: Case, rank: int) -> int:
    """Numbers of the weights that are whole at a time under zero=3: the unit in use and those gathered ahead."""
    return sum(sorted(units(case, rank))[-1 - case.config.prefetch :])


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
    """What crosses the ranks at a time: a gathered hidden state of tp, two buckets of gradients."""
    found = 0
    if case.tp > 1:
        found += 2 * case.tokens * case.width * case.bytes.compute
    if case.mesh.size("dp_replicate", "dp_shard", "cp") > 1:
        sizes = units(case, rank)
        bucket = min(int(case.config.bucket_mb * 2**20), sum(sizes) * case.bytes.wire)
        found += 2 * max(bucket, max(sizes) * case.bytes.wire if case.config.zero == 3 else 0)
    return found


def of_rank(case: Case, rank: int, schedule: Schedule | None, fused_norm: bool = True) -> Counter[str]:
    """Kind -> bytes for a rank of pipeline rank `rank`, at the moment when most is needed."""
    rates = Rates.of(case, fused_norm)
    found = state(case, rank)
    found["activations"] = under_way(case, rank, schedule, rates) + recomputing(case, rank, rates)
    if case.last_stage in case.stages_of(rank):
        found["logits"] = activations.head(case, rates)["logits"]
    found["buffers"] = buffers(case, rank)
    return found
