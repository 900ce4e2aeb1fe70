"""What a parameter comes to on a rank: its kind, its place in the pipeline, what tp and folds leave of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gangline.mesh import Mesh
from gangline.plan import Fold, Plan, matches
from gangline_parallel_megatron_style.sharding.arrays import SHARD_AXES, active_fold


@dataclass(frozen=True)
class ParamGroup:
    """Arrays that are gathered and reduced in one piece: those of a block, of the embedding or the head, which are
    stored alike (`arrays.Group`).
    """

    place: int | str
    fold: str | None
    full: bool
    trained: bool
    shards: int
    copies: int


@dataclass(frozen=True)
class Array:
    """One parameter."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "embed", "head", or the part of a block that it lies in ("attention")
    block: int | None  # the number of its block
    stages: tuple[int, ...]  # the model stages that hold it: one, or for a tied one where each of its modules is
    own: tuple[int, ...]  # its shape on a rank that holds it, before data sharding
    shards: int  # ranks that would share its optimizer state
    copies: int  # replicas of those: so many more have the same part
    fold: str | None  # the fold that it lies on
    full: bool  # computed in the dtype of the masters
    trained: bool  # has a gradient and moments
    sums: int  # neighbouring tp ranks over which its gradient is added; 1: none

    @property
    def size(self) -> int:
        """Numbers of it on a rank that holds it, before data sharding."""
        return prod(self.own)

    @property
    def part(self) -> int:
        """Numbers of it whose state one rank keeps when it is sharded: whole rows, equal shares of them."""
        rows = prod(self.own[:-1])
        return self.size // rows * -(-rows // self.shards) if rows > 1 else -(-self.size // self.shards)

    @property
    def group(self) -> ParamGroup:
        """What it is gathered and reduced with."""
        place = self.kind if self.block is None else self.block
        return ParamGroup(place, self.fold, self.full, self.trained, self.shards, self.copies)

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix, or a stack of them, of a block."""
        return self.block is not None and len(self.shape) > 1


def arrays_of(
    shapes: Mapping[str, tuple[int, ...]], plan: Plan, mesh: Mesh, stages: Sequence[range], sequence_parallel: bool
) -> list[Array]:
    """Every parameter; `stages` says which blocks each model stage has."""
    found = []
    stage_of_block = {block: stage for stage, blocks in enumerate(stages) for block in blocks}
    for name, shape in shapes.items():
        block: int | None = None
        on: tuple[int, ...]
        kind = name.split(".")[0]
        if matches(plan.blocks, name):
            index, _, inner = name.removeprefix(f"{plan.blocks}.").partition(".")
            block, kind = int(index), inner.split(".")[0]
            on = (stage_of_block[block],)
        else:
            modules = {name, *(alias for alias, owner in plan.tied if owner == name)}
            on = tuple(sorted({len(stages) - 1 if matches(plan.head, module) else 0 for module in modules}))
        fold = fold_of(plan, mesh, name, shape)
        found.append(
            Array(
                name=name,
                shape=shape,
                kind=kind,
                block=block,
                stages=on,
                own=own_shape(plan, mesh, name, shape),
                shards=mesh.size(*fold.out_of) // fold.size if fold else mesh.size(*SHARD_AXES),
                copies=mesh.size(*replica_axes(fold)),
                fold=fold.name if fold else None,
                full=any(matches(pattern, name) for pattern in plan.master_dtype),
                trained=not plan.is_frozen(name),
                sums=summed_over(plan, mesh, name, shape, sequence_parallel),
            )
        )
    return found


def own_shape(plan: Plan, mesh: Mesh, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of parameter `name`, globally of `shape`, on the rank that has most of it.

    Rows come in units (a head) of which each rank has an equal number, rounded up for a vocabulary that does not
    divide. Where there are fewer units than ranks each is held by several (key heads; arXiv 2305.13245, section 2.2).
    """
    left = list(shape)
    for axis, cut in plan.cuts_of(name, len(shape)).items():
        fold = active_fold(plan, mesh, axis)
        ranks = fold.size if fold else mesh.size(axis) if axis in mesh.axes else 1
        units = -(-left[cut.dim] // cut.unit)
        left[cut.dim] = min(left[cut.dim], -(-units // ranks) * cut.unit)
    return tuple(left)


def fold_of(plan: Plan, mesh: Mesh, name: str, shape: tuple[int, ...]) -> Fold | None:
    """The fold that a parameter lies on, where this mesh has ranks for it."""
    folds = (active_fold(plan, mesh, axis) for axis in plan.cuts_of(name, len(shape)))
    return next((fold for fold in folds if fold is not None), None)


def replica_axes(fold: Fold | None) -> tuple[str, ...]:
    """Axes along which the groups of ranks that share a state are replicas of each other."""
    return tuple(axis for axis in ("dp_replicate", *SHARD_AXES) if axis not in (fold.out_of if fold else SHARD_AXES))


def summed_over(plan: Plan, mesh: Mesh, name: str, shape: tuple[int, ...], sequence_parallel: bool) -> int:
    """Ranks of tp that hold the same rows of a parameter but compute its gradient from other tokens or heads."""
    tp, fold = mesh.size("tp"), fold_of(plan, mesh, name, shape)
    if fold is not None and "tp" in fold.out_of:
        return 1
    cut = plan.cuts_of(name, len(shape)).get("tp")
    if cut is not None:
        units = -(-shape[cut.dim] // cut.unit)
        return tp // units if units < tp and tp % units == 0 else 1
    partial = any(matches(pattern, name) for pattern in plan.partial_grad)
    return tp if sequence_parallel or partial else 1
