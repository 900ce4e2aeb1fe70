"""Which blocks each stage of a pipeline has, so that the slowest stage is as fast as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING

from gangline.model import Node, by_path, nodes
from gangline.strategy import Mesh, Plan

if TYPE_CHECKING:
    from gangline_parallel_megatron_style.config import Composed


def forward_flops(node: Node, sequence_length: int) -> int:
    """Operations of one token going forward through a node and all in it (counted as `gangline.model.flops` does)."""
    return sum(inner.flops(sequence_length) for _, inner in nodes(node))


def partition(config: Composed, mesh: Mesh, tree: Node, plan: Plan, sequence_length: int) -> list[range]:
    """Which blocks each model stage has: `parallel.stages`, else balanced by what blocks, embedding and head compute.

    With one pipeline rank there is one stage. The same on every rank.
    """
    if mesh.size("pp") == 1:
        return [range(plan.layers)]
    sizes = config.stages
    if sizes is None:
        found = by_path(tree)
        blocks = [forward_flops(found[f"{plan.blocks}.{index}"], sequence_length) for index in range(plan.layers)]
        first, last = (forward_flops(found[part], sequence_length) for part in (plan.embed, plan.head))
        if not any(blocks):  # a model that does not say what its blocks compute
            blocks, first, last = [1] * plan.layers, 0, 0
        sizes = _balanced(tuple(blocks), mesh.size("pp") * config.model_chunks, first, last)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@lru_cache(maxsize=256)
def _balanced(blocks: tuple[float, ...], stages: int, first: float, last: float) -> list[int]:
    """`balanced`, once for each question: layouts that are compared share most of them."""
    return balanced(blocks, stages, first, last)


def balanced(blocks: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[int]:
    """Blocks of each stage, in order, at least one each: exactly the least possible time of the slowest stage.

    blocks  what each block costs, in any one unit: computed (`cost.timing`) or measured
    first   what the first stage does besides (the embedding)
    last    what the last stage does besides (the head and the loss)

    Two dynamic programs over (stages, blocks before): the first finds the least possible maximum, the second the
    flattest division (least sum of squares) that keeps to it. Where several are as flat, earlier stages get fewer
    blocks, because they keep the activations of more microbatches. Raises ValueError for more stages than blocks.
    """
    count = len(blocks)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} blocks cannot make {stages} stages")
    until = [0, *accumulate(blocks)]

    def cost(stage: int, start: int, stop: int) -> float:
        return until[stop] - until[start] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    most = _best(count, stages, lambda so_far, stage, start, stop: max(so_far, cost(stage, start, stop)))[0]

    def squares(so_far: float, stage: int, start: int, stop: int) -> float:
        own = cost(stage, start, stop)
        return so_far + own * own if own <= most else float("inf")

    return _best(count, stages, squares)[1]


def _best(count: int, stages: int, extend) -> tuple[float, list[int]]:
    """The least value over all divisions of `count` blocks, and the division; `extend` adds a stage to a value."""
    values: list[float] = [0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for stage in range(stages):
        left = stages - stage - 1  # stages to come, each of which needs a block
        reached, chosen = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count - left + 1):
            for start in range(stage, stop):
                if values[start] < reached[stop]:
                    value = extend(values[start], stage, start, stop)
                    if value < reached[stop]:
                        reached[stop], chosen[stop] = value, start
        values = reached
        cuts.append(chosen)
    sizes, stop = [], count
    for chosen in reversed(cuts):
        sizes.append(stop - chosen[stop])
        stop = chosen[stop]
    return values[count], sizes[::-1]
