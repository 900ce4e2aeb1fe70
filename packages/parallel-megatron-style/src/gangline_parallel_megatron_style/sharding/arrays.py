"""Where every array of the run lies: groups, buffers and the registry, from the plan and the mesh alone. Torch-free.

An array is cut in this order: along a tensor dim over `tp`, along one over a fold, and what is left between rows over
the ranks that share its optimizer state: (dp_shard, cp), or for what lies on a fold the ranks beside the fold.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod

from gangline.mesh import Mesh
from gangline.plan import Cut, Fold, Plan, matches
from gangline.shard import Division, Layout, Registry
from gangline_parallel_megatron_style.sharding.packing import ArrayRows, Packing, pack

SHARD_AXES = ("dp_shard", "cp")  # the optimizer state of what all data ranks hold is cut over these
EMBED, HEAD, TIED = "embed", "head", "tied"  # parameter groups beside the blocks


@dataclass(frozen=True)
class ParamKind:
    """How arrays are stored and reduced: those of one parameter group and one kind share a buffer.

    fold       the fold they lie on, or None: all data ranks hold the same
    full       computed in the dtype of the masters
    trained    has gradients
    """

    fold: str | None
    full: bool
    trained: bool


@dataclass(frozen=True)
class BufferLayout:
    """Arrays of one group and one kind, in one flat buffer. `sums`: array -> ranks of `tp` its gradient is added over.

    0: none; a number: that many neighbours (the whole axis, or those that share a key head).
    """

    group: str
    kind: ParamKind
    packing: Packing
    sums: Mapping[str, int]


@dataclass(frozen=True)
class ModelLayout:
    """The whole model's arrays.

    groups  parameter group -> its buffers
    stage   parameter group -> the pp ranks that have it, its owner first
    """

    registry: Registry
    groups: Mapping[str, tuple[BufferLayout, ...]]
    stage: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelShapes:
    """What a model is made of: shapes of parameters by the name they are kept under, and what else matters of them."""

    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[tuple[int, ...], str]]  # persistent ones: shape and dtype
    aliases: Mapping[str, tuple[str, ...]]  # name of either -> all names under which modules have it
    frozen: Collection[str] = ()


def lay_out(
    plan: Plan, mesh: Mesh, given: ModelShapes, ranks: Sequence[int], *, zero: int, sequence_parallel: bool, dtype: str
) -> ModelLayout:
    """`ranks`: the pp rank of the embedding, of each block, and of the head.

    Raises ValueError for what lies outside of the modules that the plan names, or is shared in a way that has no home.
    """
    homes = {EMBED: ranks[0], **{f"{plan.blocks}.{i}": rank for i, rank in enumerate(ranks[1:-1])}, HEAD: ranks[-1]}
    groups = {name: group_of(name, plan, given.aliases[name]) for name in given.shapes}
    stage: dict[str, tuple[int, ...]] = {group: (homes[group],) for group in homes}
    if TIED in groups.values():
        stage[TIED] = tuple(dict.fromkeys((ranks[0], ranks[-1])))
    placed = {name: _placed(name, shape, plan, mesh) for name, shape in given.shapes.items()}
    shared = mesh.size("tp") > 1 and sequence_parallel
    grouped: dict[tuple[str, ParamKind], list[str]] = {}
    for name, group in groups.items():
        full = any(matches(pattern, name) for pattern in plan.master_dtype)
        kind = ParamKind(placed[name].fold, full, name not in given.frozen)
        grouped.setdefault((group, kind), []).append(name)
    layouts: dict[str, Layout] = {}
    buffers: dict[str, list[BufferLayout]] = {group: [] for group in stage}
    for (group, kind), names in grouped.items():
        axes, every, parts = shards(kind, plan, mesh, zero)
        at = (("pp", stage[group][0]),) if mesh.size("pp") > 1 else ()
        rows = [placed[name].rows(name) for name in names]
        for packing in _pack(tuple((r.count, r.width) for r in rows), parts, tuple(names)):
            for index, array in enumerate(packing.arrays):
                divisions = placed[array.name].divisions
                if parts > 1:
                    divisions += (Division(axes, (packing.bounds(index),), rows=True, every=every),)
                layouts[array.name] = Layout(given.shapes[array.name], dtype, divisions, at)
            sums = {array.name: _sums(array.name, placed[array.name], plan, mesh, shared) for array in packing.arrays}
            buffers[group].append(BufferLayout(group, kind, packing, sums))
    ordered = {f"model/{name}": layouts[name] for name in given.shapes}
    for name, (shape, kind) in given.buffers.items():
        places = sorted({homes[_place(alias, plan)] for alias in given.aliases[name]})
        if len(places) > 1:
            raise ValueError(f"the buffer {name} is shared by modules of the pipeline stages {places}; only one has it")
        ordered[f"model/{name}"] = Layout(shape, kind, at=(("pp", places[0]),) if mesh.size("pp") > 1 else ())
    registry = Registry.of(mesh, ordered)
    return ModelLayout(registry, {group: tuple(found) for group, found in buffers.items()}, stage)


def group_of(name: str, plan: Plan, aliases: Sequence[str]) -> str:
    """The group of a parameter: a block, the embedding, the head, or what both of these use."""
    places = {_place(alias, plan) for alias in (name, *aliases)}
    if len(places) == 1:
        return places.pop()
    if places == {EMBED, HEAD}:
        return TIED
    raise ValueError(f"{name} is shared by {', '.join(sorted(places))}; only the embedding and the head may share one")


def _place(name: str, plan: Plan) -> str:
    if matches(plan.embed, name):
        return EMBED
    if matches(plan.head, name):
        return HEAD
    if name.startswith(f"{plan.blocks}."):
        return f"{plan.blocks}.{name.removeprefix(f'{plan.blocks}.').split('.')[0]}"
    raise ValueError(
        f"{name} lies in none of the modules that the plan names: {plan.embed}, {plan.blocks}, {plan.head}"
    )


@dataclass(frozen=True)
class _Placed:
    """An array after the cuts along its dims."""

    shape: tuple[int, ...]  # of the largest part
    divisions: tuple[Division, ...]
    fold: str | None
    neighbours: int  # ranks of tp that share a part; all of them where tp cuts nothing

    def rows(self, name: str) -> ArrayRows:
        if len(self.shape) <= 1:
            return ArrayRows(name, 1, prod(self.shape))
        return ArrayRows(name, prod(self.shape[:-1]), self.shape[-1])


def active_fold(plan: Plan, mesh: Mesh, name: str) -> Fold | None:
    """The fold of that name, where this mesh has ranks for it."""
    return next((f for f in plan.folds if f.name == name and f.size > 1 and mesh.size(*f.out_of) > 1), None)


def _placed(name: str, shape: tuple[int, ...], plan: Plan, mesh: Mesh) -> _Placed:
    divisions: tuple[Division, ...] = ()
    left, fold_name, neighbours = list(shape), None, mesh.size("tp")
    for axis, cut in plan.cuts_of(name, len(shape)).items():
        fold = active_fold(plan, mesh, axis)
        if axis == "tp" and mesh.size("tp") > 1:
            bounds, every = over_tp(name, shape[cut.dim], cut, mesh.size("tp"))
            divisions += (Division(("tp",), (bounds,), cut.dim, every=every),)
            neighbours = every
        elif fold is not None:
            axes = tuple(a for a in mesh.axes if a in fold.out_of)
            if shape[cut.dim] % fold.size:
                raise ValueError(
                    f"{name} has {shape[cut.dim]} along dim {cut.dim}, which {axis}={fold.size} must divide"
                )
            step = shape[cut.dim] // fold.size
            bounds = tuple(i * step for i in range(fold.size + 1))
            divisions += (Division(axes, (bounds,), cut.dim),)
            fold_name = axis
        else:
            continue
        left[cut.dim] = max(b - a for a, b in pairwise(bounds))
    return _Placed(tuple(left), divisions, fold_name, neighbours)


def over_tp(name: str, length: int, cut: Cut, size: int) -> tuple[tuple[int, ...], int]:
    """(bounds, how many neighbours share a part) of a dim that `size` ranks cut between units.

    Rows of dim 0 may be cut unevenly (a vocabulary), the last parts the smaller ones. Where there are fewer units than
    ranks (key heads), each is held by as many neighbours. Raises ValueError where neither fits.
    """
    units = length // cut.unit
    if units * cut.unit != length:
        raise ValueError(f"{name}: {length} along dim {cut.dim} does not divide into units of {cut.unit}")
    if units % size == 0 or (cut.dim == 0 and cut.unit == 1 and units >= size):
        step = -(-units // size)
        return tuple(min(i * step, units) * cut.unit for i in range(size + 1)), 1
    if size % units == 0:
        return tuple(i * cut.unit for i in range(units + 1)), size // units
    raise ValueError(f"{name}: {units} units along dim {cut.dim} do not divide over tp={size}")


def _sums(name: str, placed: _Placed, plan: Plan, mesh: Mesh, shared: bool) -> int:
    tp = mesh.size("tp")
    fold = active_fold(plan, mesh, placed.fold) if placed.fold else None
    if tp == 1 or (fold is not None and "tp" in fold.out_of):
        return 0
    if any(division.axes == ("tp",) for division in placed.divisions):
        return placed.neighbours if placed.neighbours > 1 else 0
    return tp if shared or any(matches(pattern, name) for pattern in plan.partial_grad) else 0


def shards(kind: ParamKind, plan: Plan, mesh: Mesh, zero: int) -> tuple[tuple[str, ...], int, int]:
    """(axes, every, parts): how the rows of arrays of this kind are cut."""
    fold = active_fold(plan, mesh, kind.fold) if kind.fold else None
    if fold is not None:
        axes = tuple(axis for axis in mesh.axes if axis in fold.out_of)
        return axes, fold.size, mesh.size(*axes) // fold.size if zero else 1
    return SHARD_AXES, 1, mesh.size(*SHARD_AXES) if zero else 1


def _pack(rows: tuple[tuple[int, int], ...], parts: int, names: tuple[str, ...]) -> list[Packing]:
    """`pack` under these names; blocks that are alike are packed once."""
    return [
        Packing(
            tuple(ArrayRows(names[int(array.name)], array.count, array.width) for array in packing.arrays),
            packing.starts,
            packing.parts,
            packing.length,
        )
        for packing in _packed(rows, parts)
    ]


@lru_cache(maxsize=256)
def _packed(rows: tuple[tuple[int, int], ...], parts: int) -> list[Packing]:
    return pack([ArrayRows(str(index), count, width) for index, (count, width) in enumerate(rows)], parts)
