"""Sharding of arrays along their dims: over `tp` between units such as heads, over folds in equal parts.

Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import prod

from gangline.mesh import Mesh
from gangline.plan import Plan, ShardRule, matches
from gangline.shard import Division
from gangline_parallel_megatron_style.sharding.packing import ArrayRows
from gangline_parallel_megatron_style.sharding.ranks import find_active_fold


@dataclass(frozen=True)
class CutArray:
    """An array after sharding along its dims, before ZeRO shards its rows.

    shape       shape of the largest part
    fold        name of the fold that shards the array, or None
    neighbours  number of tp ranks that hold the same part: all tp ranks if the array is not sharded over tp
    """

    shape: tuple[int, ...]
    divisions: tuple[Division, ...]
    fold: str | None
    neighbours: int

    def as_rows(self, name: str) -> ArrayRows:
        """Return the array as rows along the last dim; an array of one dim is one row."""
        if len(self.shape) <= 1:
            return ArrayRows(name, 1, prod(self.shape))
        return ArrayRows(name, prod(self.shape[:-1]), self.shape[-1])


def cut_array(name: str, shape: tuple[int, ...], plan: Plan, mesh: Mesh) -> CutArray:
    """Return an array sharded along its dims by the rules of the plan. Raises ValueError if its dims do not divide."""
    divisions: tuple[Division, ...] = ()
    part_shape, fold_name, neighbours = list(shape), None, mesh.size("tp")
    for axis, rule in plan.get_shard_rules(name, len(shape)).items():
        fold = find_active_fold(plan, mesh, axis)
        if axis == "tp" and mesh.size("tp") > 1:
            bounds, every = cut_over_tp(name, shape[rule.dim], rule, mesh.size("tp"))
            divisions += (Division(("tp",), (bounds,), rule.dim, every=every),)
            neighbours = every
        elif fold is not None:
            axes = tuple(a for a in mesh.axes if a in fold.out_of)
            if shape[rule.dim] % fold.size:
                raise ValueError(
                    f"{name}: {axis}={fold.size} does not divide the size {shape[rule.dim]} of dim {rule.dim}"
                )
            step = shape[rule.dim] // fold.size
            bounds = tuple(i * step for i in range(fold.size + 1))
            divisions += (Division(axes, (bounds,), rule.dim),)
            fold_name = axis
        else:
            continue
        part_shape[rule.dim] = max(b - a for a, b in pairwise(bounds))
    return CutArray(tuple(part_shape), divisions, fold_name, neighbours)


def cut_over_tp(name: str, length: int, rule: ShardRule, size: int) -> tuple[tuple[int, ...], int]:
    """Return (bounds, every) of a dim that `size` tp ranks shard between units (heads; arXiv 2305.13245, section 2.2).

    Rank index i holds part (i // every) % parts: with 2 key-value heads, tp=4 and every=2, the ranks hold parts 0, 0,
    1, 1. Rows of dim 0 may be sharded unevenly (a vocabulary): the last parts are smaller. Raises ValueError if the
    units neither divide over the ranks nor can be repeated or sharded unevenly.
    """
    units = length // rule.granularity
    if units * rule.granularity != length:
        raise ValueError(
            f"{name}: the size {length} of dim {rule.dim} is not a multiple of its granularity {rule.granularity}"
        )
    if units % size == 0 or (rule.dim == 0 and rule.granularity == 1 and units >= size):
        step = -(-units // size)
        return tuple(min(i * step, units) * rule.granularity for i in range(size + 1)), 1
    if size % units == 0:
        return tuple(i * rule.granularity for i in range(units + 1)), size // units
    raise ValueError(f"{name}: {units} units along dim {rule.dim} do not divide over tp={size}")


def count_grad_neighbours(name: str, array: CutArray, plan: Plan, mesh: Mesh, sequence_parallel: bool) -> int:
    """Return the number of tp ranks that must sum an array's gradient; 0: no sum.

    The sum is needed if the ranks hold the same part of the array but compute with other tokens or heads.
    """
    tp = mesh.size("tp")
    fold = find_active_fold(plan, mesh, array.fold)
    if tp == 1 or (fold is not None and "tp" in fold.out_of):
        return 0
    if any(division.axes == ("tp",) for division in array.divisions):
        return array.neighbours if array.neighbours > 1 else 0
    return tp if sequence_parallel or any(matches(pattern, name) for pattern in plan.partial_grad) else 0
