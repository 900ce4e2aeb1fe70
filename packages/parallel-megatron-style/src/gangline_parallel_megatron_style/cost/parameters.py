"""What each parameter comes to on a rank: its place in the pipeline, and what tp and folds leave of it.

Read from `sharding.arrays.lay_out`, which the runtime lays its memory out by.
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

KNOWN = 4096  # blocks whose arrays are kept


@dataclass(frozen=True)
class ParamGroup:
    """Parameters that are gathered and reduced in one piece: those of one module and one kind (`sharding.arrays`)."""

    place: int | str  # the number of a block, "embed" or "head"; a tied parameter is the embedding's
    kind: ParamKind
    shards: int  # ranks that would share its optimizer state
    copies: int  # replicas of those: so many more have the same part


@dataclass(frozen=True)
class Array:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    group: ParamGroup
    stages: tuple[int, ...]  # the model stages that hold it: one, or for a tied one where each of its modules is
    own: tuple[int, ...]  # its shape on the rank that has most of it, before its rows are cut
    sums: int  # neighbouring tp ranks over which its gradient is added; 1: none

    @property
    def trained(self) -> bool:
        """Whether it has a gradient and moments."""
        return self.group.kind.trained

    @property
    def block(self) -> int | None:
        """The number of its block."""
        return self.group.place if isinstance(self.group.place, int) else None

    @cached_property
    def size(self) -> int:
        """Numbers of it on a rank that holds it, before its rows are cut."""
        return prod(self.own)

    @cached_property
    def part(self) -> int:
        """Numbers of it whose state one rank keeps when it is sharded: whole rows, equal shares of them."""
        return prod(self.part_shape)

    @cached_property
    def part_shape(self) -> tuple[int, ...]:
        """The same as rows and their length; what is one row is dealt out with others, and counts as cut."""
        rows, shards = prod(self.own[:-1]), self.group.shards
        return (-(-rows // shards), self.size // rows) if rows > 1 else (-(-self.size // shards),)

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix of a block, or a stack of them, that an optimizer may map as a whole."""
        return self.block is not None and is_mapped(self.name, self.shape)


@dataclass(frozen=True)
class Template:
    """A parameter wherever its block or end is: what does not depend on the pipeline."""

    name: str
    shape: tuple[int, ...]
    group: ParamGroup
    tied: bool  # on the first stage and on the last
    own: tuple[int, ...]
    sums: int


class ModelArrays:
    """Every parameter of a model on a mesh, whatever its pipeline; worked out once for all blocks of a kind.

    Raises ValueError as `lay_out` does.
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
        one_rank = (0,) * (plan.layers + 2)  # where pipeline ranks are does not change what a part of an array is
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
        """The parameters of a block (by its number), of the embedding or of the head, which these stages have.

        last: the number of the last stage, which has the tied ones of the embedding too.
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
    """The shape of an array on the rank that has most of it, before its rows are cut."""
    shape = list(layout.shape)
    for division in layout.divisions:
        if not division.rows:
            shape[division.dim] = max(end - start for start, end in pairwise(division.bounds[0]))
    return tuple(shape)
