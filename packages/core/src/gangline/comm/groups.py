"""Ranks that form a group along an axis, several axes together, or a fold; computed without communication."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from gangline.comm.base import Comm, Comms
from gangline.mesh import Mesh
from gangline.plan import Fold


class MeshComms(Comms):
    """Comms of one rank of a mesh; `connect` of a subclass makes a Comm from a list of ranks, once for each list."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self._made: dict[tuple[str, tuple[int, ...]], Comm] = {}

    @abstractmethod
    def connect(self, axis: str, ranks: Sequence[int]) -> Comm:
        """Return a Comm over these global ranks, which include this rank."""

    def _get_comm(self, axis: str, ranks: Sequence[int]) -> Comm:
        key = (axis, tuple(ranks))
        if key not in self._made:
            self._made[key] = self.connect(axis, ranks)
        return self._made[key]

    def get_comm(self, *axes: str) -> Comm:
        ranks = self.mesh.group(self.rank, axes)
        name = "world" if len(ranks) == self.mesh.world and len(axes) > 1 else "+".join(axes)
        return self._get_comm(name, ranks)

    def fold(self, fold: Fold) -> Comm:
        return self._get_comm(fold.name, fold.list_ranks(self.mesh, self.rank))

    def fold_rest(self, fold: Fold) -> Comm:
        return self._get_comm(f"{fold.name}_rest", fold.list_rest_ranks(self.mesh, self.rank))
