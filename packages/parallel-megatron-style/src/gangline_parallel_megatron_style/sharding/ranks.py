"""The ranks that share the optimizer state of a parameter, and their replicas. Imports no torch.

This module is the only definition of these ranks: the communicators of the runtime, the arrays that a gradient
reduction keeps, and the bytes of the closed forms are derived from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from gangline.mesh import Mesh
from gangline.plan import Fold, Plan

SHARD_AXES = ("dp_shard", "cp")  # axes that shard the optimizer state of arrays without a fold
STATE_AXES = ("dp_replicate", *SHARD_AXES)  # axes other than tp whose ranks have the same weights, full or sharded


def find_active_fold(plan: Plan, mesh: Mesh, name: str | None) -> Fold | None:
    """Return the fold called `name` if the fold, and its axes on this mesh, have more than one rank; else None."""
    return next((f for f in plan.folds if f.name == name and f.size > 1 and mesh.size(*f.out_of) > 1), None)


@dataclass(frozen=True)
class StateRanks:
    """The ranks that hold equal arrays before ZeRO shards the rows: replicas of groups of shard ranks.

    fold          the fold of the arrays, or None; rank index i along the fold's axes holds part i % fold.size
    shards        number of ranks over which ZeRO shards the rows: the ranks of (dp_shard, cp), or the ranks that hold
                  the same part of the fold
    replica_axes  axes of the replicas of a group of shard ranks
    replicas      number of replicas
    """

    fold: Fold | None
    shards: int
    replica_axes: tuple[str, ...]
    replicas: int

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, fold_name: str | None) -> StateRanks:
        """Return the ranks of arrays on the fold `fold_name`, or without a fold (None).

        Raises ValueError if the fold's size does not divide the number of ranks of its axes.
        """
        fold = find_active_fold(plan, mesh, fold_name)
        if fold is None:
            return cls(None, mesh.size(*SHARD_AXES), ("dp_replicate",), mesh.size("dp_replicate"))
        if mesh.size(*fold.out_of) % fold.size:
            axis_names = " x ".join(fold.out_of)
            raise ValueError(
                f"{fold.name}={fold.size} does not divide the {mesh.size(*fold.out_of)} ranks of {axis_names}"
            )
        axes = tuple(axis for axis in STATE_AXES if axis not in fold.out_of)
        return cls(fold, mesh.size(*fold.out_of) // fold.size, axes, mesh.size(*axes))

    def get_shard_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Return the axes of the shard ranks; with a fold the fold's axes, where every `fold.size`-th rank shards."""
        return SHARD_AXES if self.fold is None else tuple(axis for axis in mesh.axes if axis in self.fold.out_of)
