"""Which ranks make up an axis, several axes together, or a fold: arithmetic on the mesh, no communication."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from gangline.comm.base import Comm, Comms
from gangline.mesh import Mesh
from gangline.plan import Fold


def fold_ranks(mesh: Mesh, rank: int, fold: Fold) -> tuple[list[int], list[int]]:
    """(the ranks of the fold, the ranks of what is left beside it), both in order, for the fold that `rank` is in.

    The ranks along the fold's axes, in mesh order, are dealt out in runs of `size`: neighbours on the fastest axes
    make a fold. Where the mesh has none of the axes both are this rank alone.
    Raises ValueError where the axes do not divide by the fold.
    """
    axes = tuple(axis for axis in mesh.axes if axis in fold.out_of)
    together = mesh.group(rank, axes)
    if len(together) == 1:
        return [rank], [rank]
    if len(together) % fold.size:
        raise ValueError(
            f"{fold.name}={fold.size} must divide the {len(together)} ranks along {' x '.join(axes)}, its axes"
        )
    place = together.index(rank)
    first = place - place % fold.size
    return together[first : first + fold.size], together[place % fold.size :: fold.size]


class MeshComms(Comms):
    """Comms of one rank of a mesh: a subclass says how a list of ranks becomes a Comm. Each is made once."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self._made: dict[tuple[str, tuple[int, ...]], Comm] = {}

    @abstractmethod
    def connect(self, axis: str, ranks: Sequence[int]) -> Comm:
        """A Comm over these global ranks, which this rank is one of."""

    def _of(self, axis: str, ranks: Sequence[int]) -> Comm:
        key = (axis, tuple(ranks))
        if key not in self._made:
            self._made[key] = self.connect(axis, ranks)
        return self._made[key]

    def axis(self, *axes: str) -> Comm:
        ranks = self.mesh.group(self.rank, axes)
        name = "world" if len(ranks) == self.mesh.world and len(axes) > 1 else "+".join(axes)
        return self._of(name, ranks)

    def fold(self, fold: Fold) -> Comm:
        return self._of(fold.name, fold_ranks(self.mesh, self.rank, fold)[0])

    def fold_rest(self, fold: Fold) -> Comm:
        return self._of(f"{fold.name}_rest", fold_ranks(self.mesh, self.rank, fold)[1])
