"""The mesh: coordinates and groups of ranks along each axis. Torch-free; the code is equal for 1 and 16,384 ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

# Ordered from the slowest network tier to the fastest: neighbouring ranks share the fastest links.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")

Coordinate = Mapping[str, int]


@dataclass(frozen=True)
class Mesh:
    """Axis sizes of a mesh, slowest network tier first; a rank is the row-major index of its coordinate."""

    sizes: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Mesh:
        """Return a mesh with core's axes; an axis missing in `sizes` has size 1. Raises ValueError for other axes."""
        unknown = sorted(set(sizes) - set(AXES))
        if unknown:
            raise ValueError(f"no such mesh axes: {', '.join(unknown)}; the axes are {', '.join(AXES)}")
        empty = [f"{axis}={size}" for axis, size in sizes.items() if size < 1]
        if empty:
            raise ValueError(f"a mesh axis has at least one rank, not {', '.join(empty)}")
        return cls(tuple((axis, int(sizes.get(axis, 1))) for axis in AXES))

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for axis, _ in self.sizes)

    @property
    def world(self) -> int:
        return prod(size for _, size in self.sizes)

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of these axes; an axis that the mesh lacks counts as 1."""
        count = self._known.get(axes)
        if count is None:
            count = self._known[axes] = prod(size for axis, size in self.sizes if axis in axes)
        return count

    @cached_property
    def _known(self) -> dict[tuple[str, ...], int]:
        return {}

    def coordinate(self, rank: int) -> dict[str, int]:
        coordinate = {}
        for axis, size in reversed(self.sizes):
            rank, coordinate[axis] = divmod(rank, size)
        return {axis: coordinate[axis] for axis in self.axes}

    def rank(self, coordinate: Coordinate) -> int:
        rank = 0
        for axis, size in self.sizes:
            rank = rank * size + coordinate.get(axis, 0)
        return rank

    def index(self, coordinate: Coordinate, axes: Sequence[str]) -> int:
        """Return the joint index of a coordinate along `axes`, with the first axis slowest."""
        joint = 0
        for axis in axes:
            joint = joint * self.size(axis) + coordinate.get(axis, 0)
        return joint

    def coordinate_along(self, axes: Sequence[str], joint: int) -> dict[str, int]:
        """Return the coordinates along `axes` whose joint index is `joint`."""
        coordinate = {}
        for axis in reversed(axes):
            joint, coordinate[axis] = divmod(joint, self.size(axis))
        return coordinate

    def iterate_along(self, coordinate: Coordinate, axes: Sequence[str]) -> Iterator[dict[str, int]]:
        """Yield all coordinates that may differ from `coordinate` only along `axes`, in order of the joint index."""
        for point in product(*(range(self.size(axis)) for axis in axes)):
            yield {**coordinate, **dict(zip(axes, point, strict=True))}

    def group(self, rank: int, axes: Sequence[str]) -> list[int]:
        """Return the global ranks of the group of `rank` along `axes`, in order of the joint index."""
        return [self.rank(point) for point in self.iterate_along(self.coordinate(rank), axes)]
