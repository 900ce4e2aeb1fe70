"""Layout of every array of the run: parameter groups, buffers and the registry, from plan and mesh. Imports no torch.

An array is sharded in this order: along one tensor dim over `tp`, along another dim over a fold (`cuts`), and then
between rows over the ranks that share its optimizer state (`ranks`, `packing`). The runtime, checkpoints, error
feedback and the closed forms of a layout's cost all read the result of `lay_out`.
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

EMBED, HEAD, TIED = "embed", "head", "tied"  # names of the parameter groups that are not blocks


@dataclass(frozen=True)
class ParamKind:
    """Storage and reduction of arrays: arrays of one parameter group and one kind share a buffer.

    fold          the fold that shards the arrays; None: all data ranks hold equal arrays
    master_dtype  whether the arrays are computed in their stored dtype: the dtype of master weights, or a low-bit dtype
    trained       whether the arrays have gradients
    low_bit       stored dtype of the arrays, if it differs from the dtype of master weights (`Plan.low_bit`)
    """

    fold: str | None
    master_dtype: bool
    trained: bool
    low_bit: str | None = None


@dataclass(frozen=True)
class BufferLayout:
    """Arrays of one parameter group and one kind, in one flat buffer.

    sums  array -> number of neighbouring `tp` ranks that sum its gradient: all ranks of the axis, or the ranks that
          share a key-value head; 0: no sum
    """

    group: str
    kind: ParamKind
    packing: Packing
    sums: Mapping[str, int]


@dataclass(frozen=True)
class ModelLayout:
    """The layout of all arrays of the model.

    groups  parameter group -> buffers of the group
    stage   parameter group -> pp ranks that have the group, the owner first
    """

    registry: Registry
    groups: Mapping[str, tuple[BufferLayout, ...]]
    stage: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class ModelShapes:
    """Shapes of a model's parameters and buffers by stored name, their aliases, and the names of frozen parameters."""

    shapes: Mapping[str, tuple[int, ...]]
    buffers: Mapping[str, tuple[tuple[int, ...], str]]  # stored name -> (shape, dtype) of a persistent buffer
    aliases: Mapping[str, tuple[str, ...]]  # stored name of a parameter or buffer -> its names in modules
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
    """Return the layout of the model.

    ranks: pp ranks of the embedding, of each block, and of the head, in this order
    Raises ValueError for an array that is in none of the modules that the plan names, that modules share in an
    unsupported way, or that does not divide over its ranks.
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
        kind = ParamKind(cut[name].fold, plan.computes_as_stored(name), trained, plan.get_dtype(name))
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
    """Return (packing, divisions of each array by name) for every buffer of the arrays `cut` of one kind."""
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
    """Return the layouts of persistent buffers: complete, on one pipeline rank.

    Raises ValueError if modules on several pipeline ranks share a buffer.
    """
    layouts = {}
    for name, (shape, dtype) in model_shapes.buffers.items():
        places = sorted({homes[_find_place(alias, plan)] for alias in model_shapes.aliases[name]})
        if len(places) > 1:
            raise ValueError(
                f"the buffer {name} is shared by modules on the pipeline ranks {places}, and must be on one"
            )
        layouts[name_model_array(name)] = Layout(shape, dtype, at=(("pp", places[0]),) if mesh.size("pp") > 1 else ())
    return layouts


def compute_local_shape(layout: Layout, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, ...]:
    """Return the shape of an array on the rank at `coordinate` before ZeRO shards its rows."""
    shape = list(layout.shape)
    for division in layout.divisions:
        if not division.rows:
            start, end = locate_part(division, mesh, coordinate)
            shape[division.dim] = end - start
    return tuple(shape)


def locate_part(division: Division, mesh: Mesh, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """Return (start, end), along the dim of a division, of the part that the rank at `coordinate` holds."""
    part = mesh.index(coordinate, division.axes) // division.every % division.parts
    return division.bounds[0][part], division.bounds[0][part + 1]


def choose_group(name: str, plan: Plan, aliases: Sequence[str]) -> str:
    """Return the parameter group of an array: a block, `EMBED`, `HEAD`, or `TIED` if embedding and head share it.

    Raises ValueError if other modules share the array, or if it is in none of the modules that the plan names.
    """
    places = {_find_place(alias, plan) for alias in (name, *aliases)}
    if len(places) == 1:
        return places.pop()
    if places == {EMBED, HEAD}:
        return TIED
    raise ValueError(
        f"{name} is shared by {', '.join(sorted(places))}; only the embedding and the head may share a parameter"
    )


def _find_place(name: str, plan: Plan) -> str:
    if matches(plan.embed, name):
        return EMBED
    if matches(plan.head, name):
        return HEAD
    if name.startswith(f"{plan.blocks}."):
        return f"{plan.blocks}.{name.removeprefix(f'{plan.blocks}.').split('.')[0]}"
    raise ValueError(f"{name} is outside the modules of the plan: {plan.embed}, {plan.blocks}, {plan.head}")


def _pack(rows: tuple[tuple[int, int], ...], parts: int, names: tuple[str, ...]) -> list[Packing]:
    """Return the result of `pack` for arrays with the names `names`; blocks of equal shapes are packed once.

    rows: (number of rows, row length) of each array
    """
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
