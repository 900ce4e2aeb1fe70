"""Where every array of the run lies: parameter groups, buffers and the registry, from plan and mesh alone. Torch-free.

An array is cut in this order: along a tensor dim over `tp`, along one over a fold (`cuts`), and what is left between
rows over the ranks that share its optimizer state (`ranks`, `packing`). The runtime, checkpoints, error feedback and
the closed forms of a layout's cost all read what `lay_out` gives.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gangline.mesh import Mesh
from gangline.plan import Plan, matches
from gangline.shard import Division, Layout, Registry, name_model_array
from gangline_parallel_megatron_style.sharding.cuts import CutArray, count_grad_neighbours, cut_array
from gangline_parallel_megatron_style.sharding.packing import ArrayRows, Packing, pack
from gangline_parallel_megatron_style.sharding.ranks import StateRanks

EMBED, HEAD, TIED = "embed", "head", "tied"  # parameter groups beside the blocks


@dataclass(frozen=True)
class ParamKind:
    """How arrays are stored and reduced: those of one parameter group and one kind share a buffer.

    fold          the fold they lie on, or None: all data ranks hold the same
    master_dtype  computed in the dtype that they are kept in: that of master weights, or codes
    trained       has gradients
    low_bit       the dtype that they are stored in, where it is not that of master weights (`Plan.low_bit`)
    """

    fold: str | None
    master_dtype: bool
    trained: bool
    low_bit: str | None = None


@dataclass(frozen=True)
class BufferLayout:
    """Arrays of one parameter group and one kind, in one flat buffer.

    sums  array -> neighbours along `tp` over which its gradient is added: the whole axis, or those that share a
          key-value head; 0: none
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
    plan: Plan,
    mesh: Mesh,
    model_shapes: ModelShapes,
    ranks: Sequence[int],
    *,
    zero: int,
    sequence_parallel: bool,
    dtype: str,
) -> ModelLayout:
    """`ranks`: the pp rank of the embedding, of each block, and of the head.

    Raises ValueError for what lies outside of the modules that the plan names, is shared in a way that has no home, or
    does not divide.
    """
    homes = {EMBED: ranks[0], **{f"{plan.blocks}.{i}": rank for i, rank in enumerate(ranks[1:-1])}, HEAD: ranks[-1]}
    group_names = {name: choose_group(name, plan, model_shapes.aliases[name]) for name in model_shapes.shapes}
    stage: dict[str, tuple[int, ...]] = {group: (homes[group],) for group in homes}
    if TIED in group_names.values():
        stage[TIED] = tuple(dict.fromkeys((ranks[0], ranks[-1])))
    cut = {name: cut_array(name, shape, plan, mesh) for name, shape in model_shapes.shapes.items()}
    grouped: dict[tuple[str, ParamKind], list[str]] = {}
    for name, group in group_names.items():
        trained = name not in model_shapes.frozen
        kind = ParamKind(cut[name].fold, plan.computes_as_kept(name), trained, plan.get_dtype(name))
        grouped.setdefault((group, kind), []).append(name)
    layouts: dict[str, Layout] = {}
    buffers: dict[str, list[BufferLayout]] = {group: [] for group in stage}
    for (group, kind), names in grouped.items():
        at = (("pp", stage[group][0]),) if mesh.size("pp") > 1 else ()
        for packing, divisions in _pack_rows(kind, {name: cut[name] for name in names}, plan, mesh, zero):
            for array in packing.arrays:
                layouts[array.name] = Layout(
                    model_shapes.shapes[array.name], kind.low_bit or dtype, divisions[array.name], at
                )
            sums = {
                a.name: count_grad_neighbours(a.name, cut[a.name], plan, mesh, sequence_parallel)
                for a in packing.arrays
            }
            buffers[group].append(BufferLayout(group, kind, packing, sums))
    all_layouts = {name_model_array(name): layouts[name] for name in model_shapes.shapes} | _lay_out_buffers(
        plan, mesh, model_shapes, homes
    )
    registry = Registry.of(mesh, all_layouts)
    return ModelLayout(registry, {group: tuple(group_buffers) for group, group_buffers in buffers.items()}, stage)


def _pack_rows(
    kind: ParamKind, cut: Mapping[str, CutArray], plan: Plan, mesh: Mesh, zero: int
) -> list[tuple[Packing, dict[str, tuple[Division, ...]]]]:
    """The buffers of these arrays, and how each array is cut in all."""
    ranks = StateRanks.of(plan, mesh, kind.fold)
    parts = ranks.shards if zero else 1
    every = ranks.fold.size if ranks.fold else 1
    rows = [array.as_rows(name) for name, array in cut.items()]
    packings = []
    for packing in _pack(tuple((r.count, r.width) for r in rows), parts, tuple(cut)):
        divisions = {}
        for index, array in enumerate(packing.arrays):
            own = (
                (Division(ranks.get_shard_axes(mesh), (packing.compute_row_bounds(index),), rows=True, every=every),)
                if parts > 1
                else ()
            )
            divisions[array.name] = cut[array.name].divisions + own
        packings.append((packing, divisions))
    return packings


def _lay_out_buffers(plan: Plan, mesh: Mesh, model_shapes: ModelShapes, homes: Mapping[str, int]) -> dict[str, Layout]:
    """Persistent buffers are whole, on the pipeline rank of their module."""
    layouts = {}
    for name, (shape, dtype) in model_shapes.buffers.items():
        places = sorted({homes[_find_place(alias, plan)] for alias in model_shapes.aliases[name]})
        if len(places) > 1:
            raise ValueError(f"the buffer {name} is shared by modules of the pipeline stages {places}; only one has it")
        layouts[name_model_array(name)] = Layout(shape, dtype, at=(("pp", places[0]),) if mesh.size("pp") > 1 else ())
    return layouts


def compute_local_shape(layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of an array on the rank at `coordinate` before its rows are cut."""
    shape = list(layout.shape)
    for division in layout.divisions:
        if not division.rows:
            start, end = locate_part(division, mesh, coordinate)
            shape[division.dim] = end - start
    return tuple(shape)


def locate_part(division: Division, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """(start, end) along its dim of the part of a division that the rank at `coordinate` holds."""
    part = mesh.index(coordinate, division.axes) // division.every % division.parts
    return division.bounds[0][part], division.bounds[0][part + 1]


def choose_group(name: str, plan: Plan, aliases: Sequence[str]) -> str:
    """The parameter group of an array: a block, the embedding, the head, or what both of these use.

    Raises ValueError for other ways of sharing, and for what lies in none of them.
    """
    places = {_find_place(alias, plan) for alias in (name, *aliases)}
    if len(places) == 1:
        return places.pop()
    if places == {EMBED, HEAD}:
        return TIED
    raise ValueError(f"{name} is shared by {', '.join(sorted(places))}; only the embedding and the head may share one")


def _find_place(name: str, plan: Plan) -> str:
    if matches(plan.embed, name):
        return EMBED
    if matches(plan.head, name):
        return HEAD
    if name.startswith(f"{plan.blocks}."):
        return f"{plan.blocks}.{name.removeprefix(f'{plan.blocks}.').split('.')[0]}"
    raise ValueError(
        f"{name} lies in none of the modules that the plan names: {plan.embed}, {plan.blocks}, {plan.head}"
    )


def _pack(rows: tuple[tuple[int, int], ...], parts: int, names: tuple[str, ...]) -> list[Packing]:
    """`pack` under these names; blocks of the same shapes are packed once."""
    return [
        Packing(
            tuple(ArrayRows(names[int(array.name)], array.count, array.width) for array in packing.arrays),
            packing.starts,
            packing.parts,
            packing.length,
        )
        for packing in _pack_widths(rows, parts)
    ]


@lru_cache(maxsize=256)
def _pack_widths(rows: tuple[tuple[int, int], ...], parts: int) -> list[Packing]:
    return pack([ArrayRows(str(index), count, width) for index, (count, width) in enumerate(rows)], parts)
