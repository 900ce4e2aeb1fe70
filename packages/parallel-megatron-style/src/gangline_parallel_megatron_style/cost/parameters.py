"""Local size of each parameter on a rank, by pipeline stage, tp shard and fold.

The sizes come from `sharding.arrays.lay_out`, the layout that the runtime uses.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import prod

from gangline.mesh import Mesh
from gangline.plan import is_mapped
from gangline.shard import Layout, name_model_array
from gangline_parallel_megatron_style.layout.alike import AlikeBlocks
from gangline_parallel_megatron_style.sharding.arrays import EMBED, HEAD, TIED, ModelShapes, ParamKind, lay_out
from gangline_parallel_megatron_style.sharding.ranks import StateRanks

KNOWN = 4096  # maximum number of blocks whose arrays are cached


@dataclass(frozen=True)
class ParamGroup:
    """The parameters of one module and one kind (`sharding.arrays`), which are gathered and reduced together."""

    place: int | str  # index of a block, "embed" or "head"; tied parameters are in "embed"
    kind: ParamKind
    shards: int  # number of ranks over which ZeRO shards the optimizer state, if it is on
    copies: int  # number of ranks that hold a copy of the same shard


@dataclass(frozen=True)
class Array:
    """One parameter of the model, with its size on a rank."""

    name: str
    shape: tuple[int, ...]
    group: ParamGroup
    stages: tuple[int, ...]  # model stages that hold the parameter: one, or the stages of all modules that tie it
    own: tuple[int, ...]  # shape on the rank that has most of the parameter, before ZeRO shards the rows
    sums: int  # number of neighbouring tp ranks that sum the gradient; 1: no sum

    @property
    def trained(self) -> bool:
        """Return whether the parameter has a gradient and optimizer state."""
        return self.group.kind.trained

    @property
    def block(self) -> int | None:
        """Return the index of the parameter's block; None for the embedding and the head."""
        return self.group.place if isinstance(self.group.place, int) else None

    @cached_property
    def size(self) -> int:
        """Return the maximum number of elements of the parameter on a rank, before ZeRO shards the rows."""
        return prod(self.own)

    @cached_property
    def part(self) -> int:
        """Return the number of elements on a rank after ZeRO shards the rows: full rows, the same number per rank."""
        return prod(self.part_shape)

    @cached_property
    def part_shape(self) -> tuple[int, ...]:
        """Return the shape of `part`: (rows, row length), or (elements,) for a single row, which counts as split."""
        rows, shards = prod(self.own[:-1]), self.group.shards
        return (-(-rows // shards), self.size // rows) if rows > 1 else (-(-self.size // shards),)

    @property
    def matrix(self) -> bool:
        """Return whether the parameter is a matrix of a block, or stacked matrices, which Muon maps in full."""
        return self.block is not None and is_mapped(self.name, self.shape)


@dataclass(frozen=True)
class Template:
    """A parameter of a kind of block, of the embedding or of the head: `Array` without its pipeline stages."""

    name: str
    shape: tuple[int, ...]
    group: ParamGroup
    tied: bool  # whether the first and the last stage share the parameter
    own: tuple[int, ...]
    sums: int


class ModelArrays:
    """Every parameter of a model on a mesh, for any pipeline; computed once for all blocks of a kind.

    Raises ValueError for the same reasons as `lay_out`.
    """

    def __init__(self, model: AlikeBlocks, mesh: Mesh, sequence_parallel: bool) -> None:
        self.model = model
        plan, prefix = model.plan, f"{model.plan.blocks}."
        self._prefix = prefix
        self._known: dict[tuple[int | str, tuple[int, ...], int], list[Array]] = {}
        kinds = set(model.kinds)
        shapes = {
            name: shape
            for name, shape in model.shapes.items()
            if not name.startswith(prefix) or int(name[len(prefix) :].split(".")[0]) in kinds
        }
        aliases = {name: (name, *(alias for alias, owner in plan.tied if owner == name)) for name in shapes}
        model_shapes = ModelShapes(shapes, {}, aliases, {name for name in shapes if plan.is_frozen(name)})
        one_rank = (0,) * (plan.layers + 2)  # the pipeline rank of an array does not change its shards
        laid_out = lay_out(
            plan, mesh, model_shapes, one_rank, zero=0, sequence_parallel=sequence_parallel, dtype="float32"
        )
        place: dict[str, int | str] = {EMBED: EMBED, TIED: EMBED, HEAD: HEAD}
        place |= {f"{prefix}{kind}": kind for kind in kinds}
        templates = {}
        for buffer in (buffer for buffers in laid_out.groups.values() for buffer in buffers):
            ranks = StateRanks.of(plan, mesh, buffer.kind.fold)
            group = ParamGroup(place[buffer.group], buffer.kind, ranks.shards, ranks.replicas)
            for name, sums in buffer.sums.items():
                own = compute_largest_shape(laid_out.registry[name_model_array(name)])
                templates[name] = Template(name, shapes[name], group, buffer.group == TIED, own, max(sums, 1))
        self._templates: dict[int | str, list[Template]] = {EMBED: [], HEAD: [], **{kind: [] for kind in kinds}}
        for name in shapes:
            self._templates[templates[name].group.place].append(templates[name])

    def list_arrays(self, place: int | str, stages: tuple[int, ...], last: int) -> list[Array]:
        """Return the parameters of a block (by index), of "embed" or of "head".

        stages  model stages that have these parameters
        last    index of the last stage, which also has the tied parameters of the embedding
        """
        key = (place, stages, last)
        if key not in self._known:
            if len(self._known) >= KNOWN:
                self._known.clear()
            self._known[key] = self._make_arrays(place, stages, last)
        return self._known[key]

    def _make_arrays(self, place: int | str, stages: tuple[int, ...], last: int) -> list[Array]:
        if isinstance(place, str):
            tied = tuple(sorted({*stages, last}))
            return [
                Array(t.name, t.shape, t.group, tied if t.tied else stages, t.own, t.sums)
                for t in self._templates[place]
            ]
        kind = self.model.kinds[place]
        before, behind = f"{self._prefix}{place}.", len(f"{self._prefix}{kind}.")
        groups = {group: replace(group, place=place) for group in {t.group for t in self._templates[kind]}}
        return [
            Array(
                before + t.name[behind:],
                t.shape,
                groups[t.group],
                stages,
                t.own,
                t.sums,
            )
            for t in self._templates[kind]
        ]


def compute_largest_shape(layout: Layout) -> tuple[int, ...]:
    """Return the largest local shape of an array over all ranks, before ZeRO shards the rows."""
    shape = list(layout.shape)
    for division in layout.divisions:
        if not division.rows:
            shape[division.dim] = max(end - start for start, end in pairwise(division.bounds[0]))
    return tuple(shape)
