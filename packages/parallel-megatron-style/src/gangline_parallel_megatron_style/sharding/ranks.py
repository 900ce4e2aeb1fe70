"""Which ranks share the optimizer state of a parameter, and which of them are replicas. Torch-free.

This is said once: the runtime makes its communicators of it, a reduction of gradients its arrays, the closed forms
their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.mesh import Mesh
from gangline.plan import Fold, Plan

SHARD_AXES = ("dp_shard", "cp")  # the optimizer state of what all data ranks hold is cut over these
STATE_AXES = ("dp_replicate", *SHARD_AXES)  # all ranks that have the same weights, cut or whole, where tp cuts nothing


def find_active_fold(plan: Plan, mesh: Mesh, name: str | None) -> Fold | None:
    """The fold of that name, where this mesh has ranks for it."""
    return next((f for f in plan.folds if f.name == name and f.size > 1 and mesh.size(*f.out_of) > 1), None)


@dataclass(frozen=True)
class StateRanks:
    """The ranks that hold the same arrays before their rows are cut, in two levels.

    fold          the fold that the arrays lie on: rank index i along its axes holds part i % fold.size
    shards        ranks over which ZeRO cuts the rows: those of (dp_shard, cp), or the ranks beside the fold
    replica_axes  along these lie the replicas of each such group of ranks
    replicas      how many there are
    """

    fold: Fold | None
    shards: int
    replica_axes: tuple[str, ...]
    replicas: int

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, fold_name: str | None) -> StateRanks:
        """Raises ValueError for a fold that does not divide the ranks that it is out of."""
        fold = find_active_fold(plan, mesh, fold_name)
        if fold is None:
            return cls(None, mesh.size(*SHARD_AXES), ("dp_replicate",), mesh.size("dp_replicate"))
        if mesh.size(*fold.out_of) % fold.size:
            axis_names = " x ".join(fold.out_of)
            raise ValueError(
                f"{fold.name} {fold.size} does not divide the {mesh.size(*fold.out_of)} ranks of {axis_names}"
            )
        axes = tuple(axis for axis in STATE_AXES if axis not in fold.out_of)
        return cls(fold, mesh.size(*fold.out_of) // fold.size, axes, mesh.size(*axes))

    def get_shard_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Axes along which the shards lie; on a fold its own axes, of which every `fold.size`-th rank is beside."""
        return SHARD_AXES if self.fold is None else tuple(axis for axis in mesh.axes if axis in self.fold.out_of)
