"""Owners of boxes: the ranks that hold each box of an array, and the rank that writes it.

Computed once for all arrays of one shape and sharding: a model has thousands of arrays, but few such combinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from gangline.mesh import Mesh
from gangline.shard import Box, Division, Layout, Places, find_primary_replica


class BoxOwners:
    """Owners of the boxes of arrays with one shape and sharding. `turn`, which differs by array, spreads the writes."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.mesh, self.layout = mesh, layout
        self._places = Places(mesh, layout)
        self._held: dict[int, tuple[tuple[int, ...], int, list[Box]] | None] = {}  # rank -> (parts, replica, boxes)
        self._ranks: dict[tuple[tuple[int, ...], int], int] = {}  # (parts, replica) -> rank
        self.met: dict[
            Box, list[tuple[tuple[int, ...], list[Box]]]
        ] = {}  # by wanted box: (parts, boxes) that overlap it, filled in by `overlap`

    def list_written(self, rank: int, turn: int) -> list[Box]:
        """Return the non-empty boxes of an array that a rank writes."""
        if rank not in self._held:
            self._held[rank] = self._locate(rank)
        location = self._held[rank]
        if location is None:
            return []
        parts, replica, boxes = location
        return boxes if replica == self._compute_primary(parts, turn) else []

    def get_writer(self, parts: Sequence[int], turn: int) -> int:
        """Return the rank that writes these parts of an array."""
        key = (tuple(parts), self._compute_primary(parts, turn))
        if key not in self._ranks:
            self._ranks[key] = self.mesh.rank(self._places.coordinate(*key))
        return self._ranks[key]

    def list_replicas(self, rank: int, most: int) -> tuple[int, ...]:
        """Return up to `most` ranks that hold the same boxes as `rank`, itself included; equal for all these ranks."""
        coordinate, replicas = self.mesh.coordinate(rank), self._places.replicas
        parts, replica = self._places.of(coordinate)
        first = replica // most * most
        return tuple(
            self.mesh.rank(self._places.coordinate(parts, number))
            for number in range(first, min(first + most, replicas))
        )

    def _locate(self, rank: int) -> tuple[tuple[int, ...], int, list[Box]] | None:
        coordinate = self.mesh.coordinate(rank)
        if any(coordinate[axis] != index for axis, index in self.layout.at):
            return None
        parts, replica = self._places.of(coordinate)
        return parts, replica, [box for box in self.layout.list_boxes(parts) if box.size]

    def _compute_primary(self, parts: Sequence[int], turn: int) -> int:
        return (turn + find_primary_replica(self.layout, parts, self._places.writers)) % self._places.writers


@lru_cache(maxsize=1024)
def _make_box_owners(
    mesh: Mesh,
    shape: tuple[int, ...],
    divisions: tuple[Division, ...],
    at: tuple[tuple[str, int], ...],
    differs: tuple[str, ...],
) -> BoxOwners:
    return BoxOwners(mesh, Layout(shape, divisions=divisions, at=at, differs=differs))


def get_box_owners(mesh: Mesh, layout: Layout) -> BoxOwners:
    """Return the owners of an array's boxes: one object for all arrays of its shape and sharding."""
    return _make_box_owners(mesh, layout.shape, layout.divisions, layout.at, layout.differs)
