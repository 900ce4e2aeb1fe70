"""Partition of the blocks into pipeline stages, so that the slowest stage is as fast as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from gangline.mesh import Mesh
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline_parallel_megatron_style.layout.alike import group_blocks

if TYPE_CHECKING:
    from gangline_parallel_megatron_style.config import AxesConfig


def partition(config: AxesConfig, mesh: Mesh, tree: Node, plan: Plan, sequence_length: int) -> list[range]:
    """Return the blocks of each pipeline stage: by `parallel.stages`, else balanced by FLOPs, with embedding and head.

    With one pipeline rank there is one stage. The result is equal on every rank.
    """
    if mesh.size("pp") == 1:
        return [range(plan.layers)]
    sizes = config.stages
    if sizes is None:
        blocks, first, last = group_blocks(tree, plan).get_forward_flops(sequence_length)
        if not any(blocks):  # the model does not declare its FLOPs
            blocks, first, last = [1] * plan.layers, 0, 0
        sizes = _balance(tuple(blocks), mesh.size("pp") * config.model_chunks, first, last)
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


@lru_cache(maxsize=256)
def _balance(blocks: tuple[float, ...], stages: int, first: float, last: float) -> list[int]:
    """Return the result of `balance`, cached, because a comparison of layouts repeats many arguments."""
    return balance(blocks, stages, first, last)


def balance(blocks: Sequence[float], stages: int, first: float = 0, last: float = 0) -> list[int]:
    """Return the number of blocks of each stage, in order, at least 1, such that the slowest stage is fastest.

    blocks  cost of each block, in any one unit: computed (`cost.timing`) or measured
    first   additional cost of the first stage (the embedding)
    last    additional cost of the last stage (the head and the loss), in the same unit

    The result is exact, by two dynamic programs over (stages, preceding blocks). The first finds the minimum cost of
    the slowest stage; the second finds the most even division (least sum of squares) with that cost. Among equally even
    divisions, earlier stages get fewer blocks, because they keep the activations of more microbatches. Raises
    ValueError for more stages than blocks.
    """
    count = len(blocks)
    if not 1 <= stages <= count:
        raise ValueError(f"{count} blocks cannot be divided into {stages} stages")
    until = [0, *accumulate(blocks)]

    def compute_cost(stage: int, start: int, stop: int) -> float:
        return until[stop] - until[start] + (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)

    even = [count * stage // stages for stage in range(stages + 1)]
    # upper bound: cost of the slowest stage of an even division
    bound = max(compute_cost(stage, start, stop) for stage, (start, stop) in enumerate(pairwise(even)))

    def make_start_finder(most: float) -> Callable[[int, int], int]:
        """Return a function (stage, stop) -> the lowest first block with which the stage costs at most `most`.

        The stage ends before block `stop`.
        """

        def find_start(stage: int, stop: int) -> int:
            own = (first if stage == 0 else 0) + (last if stage == stages - 1 else 0)
            start = max(stage, bisect_left(until, until[stop] + own - most) - 1)
            while start < stop and compute_cost(stage, start, stop) > most:
                start += 1
            return start

        return find_start

    most = _find_best_division(
        count,
        stages,
        make_start_finder(bound),
        lambda so_far, stage, start, stop: max(so_far, compute_cost(stage, start, stop)),
    )[0]

    def add_square(so_far: float, stage: int, start: int, stop: int) -> float:
        own = compute_cost(stage, start, stop)
        return so_far + own * own

    return _find_best_division(count, stages, make_start_finder(most), add_square)[1]


def _find_best_division(
    count: int, stages: int, earliest: Callable[[int, int], int], extend: Callable[[float, int, int, int], float]
) -> tuple[float, list[int]]:
    """Return the least value over all divisions of `count` blocks, and the sizes of the stages in that division.

    earliest  function (stage, stop) -> the lowest block with which the stage may begin
    extend    function (value of the earlier stages, stage, start, stop) -> value with the stage
    """
    values: list[float] = [0] + [float("inf")] * count
    cuts: list[list[int]] = []
    for stage in range(stages):
        later_stages = stages - stage - 1  # each later stage needs a block
        reached, starts = [float("inf")] * (count + 1), [0] * (count + 1)
        for stop in range(stage + 1, count - later_stages + 1):
            for start in range(earliest(stage, stop), stop):
                if values[start] < reached[stop]:
                    value = extend(values[start], stage, start, stop)
                    if value < reached[stop]:
                        reached[stop], starts[stop] = value, start
        values = reached
        cuts.append(starts)
    sizes, stop = [], count
    for starts in reversed(cuts):
        sizes.append(stop - starts[stop])
        stop = starts[stop]
    return values[count], sizes[::-1]
