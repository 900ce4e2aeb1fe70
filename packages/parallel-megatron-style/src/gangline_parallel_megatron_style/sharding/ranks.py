"""The ranks that share the optimizer state of a parameter, and their replicas. Torch-free.

This is the only definition: the runtime derives its communicators from it, a reduction of gradients its arrays, the
closed forms their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.mesh import Mesh
from gangline.plan import Fold, Plan

SHARD_AXES = ("dp_shard", "cp")  # axes that shard the optimizer state of arrays without a fold
STATE_AXES = ("dp_replicate", *SHARD_AXES)  # axes whose ranks have equal weights, sharded or full, apart from tp


def find_active_fold(plan: Plan, mesh: Mesh, name: str | None) -> Fold | None:
    """Return the fold of that name if it and its axes on this mesh have more than one rank; else None."""
    return next((f for f in plan.folds if f.name == name and f.size > 1 and mesh.size(*f.out_of) > 1), None)


@dataclass(frozen=True)
class StateRanks:
    """The ranks that hold equal arrays before their rows are sharded, in two levels.

    fold          the fold of the arrays, or None: rank index i along its axes holds part i % fold.size
    shards        ranks over which ZeRO shards the rows: those of (dp_shard, cp), or those with one part of the fold
    replica_axes  axes of the replicas of each such group of ranks
    replicas      number of replicas
    """

    fold: Fold | None
    shards: int
    replica_axes: tuple[str, ...]
    replicas: int

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, fold_name: str | None) -> StateRanks:
        """Return the ranks of arrays on a fold or on none. Raises ValueError if it does not divide its axes' ranks."""
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
        """Return the axes of the shards; on a fold its own axes, of which every `fold.size`-th rank is a shard."""
        return SHARD_AXES if self.fold is None else tuple(axis for axis in mesh.axes if axis in self.fold.out_of)
