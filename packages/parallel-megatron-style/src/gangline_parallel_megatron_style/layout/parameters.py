"""What a parameter comes to on a rank: its kind, its place in the pipeline, what tp and folds leave of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from gangline.mesh import Mesh
from gangline.plan import Plan, matches


@dataclass(frozen=True)
class Array:
    """One parameter. `size`: numbers of it on a rank that holds it, before data sharding."""

    name: str
    shape: tuple[int, ...]
    kind: str  # "embed", "head", or the part of a block that it lies in ("attention")
    block: int | None  # the number of its block
    stages: tuple[int, ...]  # the model stages that hold it: one, or for a tied one where each of its modules is
    size: int
    cut: bool  # whether tp or a fold cuts it

    @property
    def matrix(self) -> bool:
        """Whether it is a matrix, or a stack of them, of a block."""
        return self.block is not None and len(self.shape) > 1


def arrays_of(shapes: Mapping[str, tuple[int, ...]], plan: Plan, mesh: Mesh, stages: Sequence[range]) -> list[Array]:
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
        size = own_size(plan, mesh, name, shape)
        cut = plan.cut(name)
        found.append(Array(name, shape, kind, block, on, size, cut is not None and len(shape) > cut.dim))
    return found


def own_size(plan: Plan, mesh: Mesh, name: str, shape: tuple[int, ...]) -> int:
    """Numbers of parameter `name`, globally of `shape`, on the rank that has most of it.

    Rows come in units (a head) of which each rank has an equal number, rounded up for a vocabulary that does not
    divide. Where there are fewer units than ranks each is held by several (key heads; arXiv 2305.13245, section 2.2).
    """
    cut = plan.cut(name)
    if cut is None or len(shape) <= cut.dim:
        return prod(shape)
    length = shape[cut.dim]
    units = -(-length // cut.unit)
    return prod(shape) // length * min(length, -(-units // ranks_on(plan, mesh, cut.axis)) * cut.unit)


def ranks_on(plan: Plan, mesh: Mesh, axis: str) -> int:
    """The size of a mesh axis, or of a fold: 1 where the mesh has only one rank on the axes it is made of."""
    for fold in plan.folds:
        if fold.name == axis:
            return fold.size if mesh.size(*fold.out_of) > 1 else 1
    return mesh.size(axis)
