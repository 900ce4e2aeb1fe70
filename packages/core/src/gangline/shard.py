"""Shards and their registry: the state of a run as strategies, optimizers and checkpointers exchange it.

A run's state is a set of named global arrays. A `Shard` is a box of a global array that a rank holds. The `Registry`
maps every array to the ranks that hold each box. It is a pure function of plan and mesh, equal on every rank, so that a
checkpointer plans without communication. Its size grows with arrays and boundaries, not with ranks times arrays.

The registry is torch-free; dtypes are torch's names ("float32").
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from math import prod
from typing import TYPE_CHECKING

from gangline.mesh import Coordinate, Mesh

if TYPE_CHECKING:
    import torch

ITEMSIZE = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "int16": 2}
MODEL = "model"  # prefix of the names of the model's arrays


def name_model_array(parameter: str) -> str:
    """Return the name of the array that holds a parameter or buffer of the model."""
    return f"{MODEL}/{parameter}"


def parse_parameter(array: str) -> str:
    """Return the name of the parameter or buffer in an array `model/...`: the inverse of `name_model_array`."""
    return array.removeprefix(f"{MODEL}/")


def is_of_model(array: str) -> bool:
    """Return whether an array of this name belongs to the model, not to the optimizer or a callback."""
    return array.startswith(f"{MODEL}/")


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype in the registry: "float32"."""
    return str(dtype).removeprefix("torch.")


def get_itemsize(dtype: str) -> int:
    """Return the bytes per element of a dtype; 1 for a name that is not in ITEMSIZE (bool, uint8, float8)."""
    return ITEMSIZE.get(dtype, 1)


@dataclass(frozen=True, order=True)
class Box:
    """Axis-aligned part of a global array, by offset and shape; both are () for an array of 0 dims."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def limits(self) -> tuple[tuple[int, int], ...]:
        """Limits (start, stop) of the box along each dim."""
        return tuple((start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.limits)

    def intersect(self, other: Box) -> Box | None:
        """Return the intersection of both boxes, in global coordinates; None if they do not overlap."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def slice_within(self, outer: Box) -> tuple[slice, ...]:
        """Return the slices of this box in a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + length)
            for start, base, length in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass
class Shard:
    """One box of a global array on this rank: at `offset` of the array `name`.

    `local` is a writable view without padding, valid until the next step. `primary` is true on exactly one of the ranks
    that hold the box: the rank that writes the box into a checkpoint.
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: torch.dtype
    offset: tuple[int, ...]
    local: torch.Tensor
    primary: bool = True

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.local.shape))


@dataclass(frozen=True)
class Division:
    """Sharding of an array over `axes`: parts along `dim` (or of rows), chosen by the joint coordinate along `axes`.

    bounds  boundaries of the parts, one more than there are parts; two equal neighbours enclose an empty part
    every   the rank with joint coordinate i holds part (i // every) % parts. With 2 key-value heads, tp=4 and every=2:
            parts 0, 0, 1, 1. Sharding over a fold has every=1 on the fold's axes; sharding over the ranks across folds
            has every = the fold's size. Ranks that hold the same part are replicas
    rows    `bounds` count rows of the part that earlier divisions gave, leading dims flattened (a row runs along the
            last dim); such a part of a stacked array is a few boxes. `bounds` may then depend on the part of the
            earlier divisions: one tuple for each such part, in joint order
    Two divisions of an array have equal axes, or no axis in common. Example: an array (4, 6), split in halves over tp=4
    and each half by rows over dp_shard=2 (ZeRO), has Division(("tp",), ((0, 2, 4),), every=2) and
    Division(("dp_shard",), ((0, 1, 2),), rows=True). The ranks at dp_shard=1 and tp=2 or 3 hold parts (1, 1), the
    Box((3, 0), (1, 6)), as replicas.
    """

    axes: tuple[str, ...]
    bounds: tuple[tuple[int, ...], ...]
    dim: int = 0
    rows: bool = False
    every: int = 1

    @property
    def parts(self) -> int:
        return len(self.bounds[0]) - 1


@dataclass(frozen=True)
class Layout:
    """Placement of one global array on the mesh.

    `at` fixes coordinates (a pipeline stage: {"pp": 2}). Ranks along axes that neither `at` nor a division names hold
    replicas; replica number `turn` (plus the part numbers) is primary. `differs` names the replica axes along which
    replicas hold different values between synchronisations: the first rank along these axes is primary.
    """

    shape: tuple[int, ...]
    dtype: str = "float32"
    divisions: tuple[Division, ...] = ()
    at: tuple[tuple[str, int], ...] = ()
    turn: int = 0
    differs: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * get_itemsize(self.dtype)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        return tuple(axis for division in self.divisions for axis in division.axes)

    def list_boundaries(self) -> tuple[tuple[int, ...], ...]:
        """Return all boundaries of boxes along each dim, including 0 and the length."""
        boundaries = [{0, length} for length in self.shape]
        for division in self.divisions:
            if not division.rows:
                boundaries[division.dim].update(division.bounds[0])
        if any(division.rows for division in self.divisions):
            for _, box in self.iterate_boxes():
                for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
                    boundaries[dim].update((start, start + length))
        return tuple(tuple(sorted(dim)) for dim in boundaries)

    def list_boxes(self, parts: Sequence[int]) -> list[Box]:
        """Return the boxes of a rank that holds these parts, one part number for each division."""
        boxes, earlier = [Box((0,) * len(self.shape), self.shape)], 0
        for division, part in zip(self.divisions, parts, strict=True):
            bounds = division.bounds[earlier] if len(division.bounds) > 1 else division.bounds[0]
            start, stop = bounds[part], bounds[part + 1]
            if stop <= start:
                return []
            if division.rows:
                boxes = _take_rows(boxes, start, stop)
            else:
                boxes = [cut for box in boxes if (cut := _cut_along(box, division.dim, start, stop)) is not None]
            earlier = earlier * division.parts + part
        return boxes

    def iterate_boxes(self) -> Iterator[tuple[tuple[int, ...], Box]]:
        """Yield (part numbers, box) for every box of the array, in order of the part numbers."""
        for parts in product(*(range(division.parts) for division in self.divisions)):
            for box in self.list_boxes(parts):
                yield parts, box


def _cut_along(box: Box, dim: int, start: int, stop: int) -> Box | None:
    """Return the part of `box` between `start` and `stop` (global coordinates) along `dim`; None if it is empty."""
    slab = Box(
        box.offset[:dim] + (start,) + box.offset[dim + 1 :], box.shape[:dim] + (stop - start,) + box.shape[dim + 1 :]
    )
    return box.intersect(slab)


def _take_rows(boxes: list[Box], start: int, stop: int) -> list[Box]:
    """Return rows `start` to `stop` of `boxes`, numbered across all boxes; rows past the last are padding."""
    row_boxes: list[Box] = []
    for box in boxes:
        rows = prod(box.shape[:-1])
        if max(start, 0) < min(stop, rows):
            row_boxes += _cut_rows(box, max(start, 0), min(stop, rows))
        start, stop = start - rows, stop - rows
    return row_boxes


def _cut_rows(box: Box, start: int, stop: int) -> list[Box]:
    """Return rows `start` to `stop` > `start` of `box`, with leading dims flattened, as the fewest boxes in order."""
    if len(box.shape) <= 1:
        return [box]
    if len(box.shape) == 2:
        return [Box((box.offset[0] + start, *box.offset[1:]), (stop - start, box.shape[1]))]
    row = prod(box.shape[1:-1])
    boxes: list[Box] = []
    first, last = -(-start // row), stop // row
    if first > last:  # within one matrix of the stack
        return [
            _lead(box, start // row, inner)
            for inner in _cut_rows(_drop_outer(box), start % row, stop - start // row * row)
        ]
    if start % row:
        boxes += [_lead(box, start // row, inner) for inner in _cut_rows(_drop_outer(box), start % row, row)]
    if last > first:
        boxes.append(Box((box.offset[0] + first, *box.offset[1:]), (last - first, *box.shape[1:])))
    if stop % row:
        boxes += [_lead(box, last, inner) for inner in _cut_rows(_drop_outer(box), 0, stop % row)]
    return boxes


def _drop_outer(box: Box) -> Box:
    return Box(box.offset[1:], box.shape[1:])


def _lead(box: Box, index: int, inner: Box) -> Box:
    return Box((box.offset[0] + index, *inner.offset), (1, *inner.shape))


class Places:
    """Map between a mesh coordinate and (the part of an array, the replica number of that part) that it holds.

    Along each tuple of axes that divisions use, the joint coordinate is a mixed-radix number. Each division reads one
    digit; the other digits, and the axes that no division names, count replicas. In the example of `Division`:
    `of({"dp_shard": 1, "tp": 3})` is ((1, 1), 1): parts (1, 1), replica 1. Replica 0 is at dp_shard=1, tp=2.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.mesh, self.layout = mesh, layout
        fixed = dict(layout.at)
        free = [axis for axis in mesh.axes if axis not in layout.cut_axes and axis not in fixed]
        self.free = tuple(sorted(free, key=lambda axis: axis not in layout.differs))  # replicas that write come first
        self.digits: dict[tuple[str, ...], list[tuple[int, int, int]]] = {}  # axes -> (every, parts, division)
        for number, division in enumerate(layout.divisions):
            self.digits.setdefault(division.axes, []).append((division.every, division.parts, number))
        self.replicas = mesh.size(*self.free)
        for axes, digits in self.digits.items():
            digits.sort()
            self.replicas *= mesh.size(*axes) // prod(parts for _, parts, _ in digits)
        self.writers = self.replicas // mesh.size(*(axis for axis in free if axis in layout.differs))

    @property
    def key(self) -> tuple:
        """Key that is equal for arrays whose replicas are placed on the same ranks."""
        return (
            self.layout.at,
            self.free,
            self.writers,
            tuple((axes, tuple(digits)) for axes, digits in self.digits.items()),
        )

    def of(self, coordinate: Coordinate) -> tuple[tuple[int, ...], int]:
        """Return (part number for each division, replica number) at a coordinate."""
        parts = [0] * len(self.layout.divisions)
        replica = self.mesh.index(coordinate, self.free)
        for axes, digits in self.digits.items():
            joint = self.mesh.index(coordinate, axes)
            remainder, worth, base = 0, 1, 1
            for every, count, number in digits:
                remainder += joint // base % (every // base) * worth
                worth *= every // base
                parts[number] = joint // every % count
                base = every * count
            remainder += joint // base * worth
            replica = replica * (worth * (self.mesh.size(*axes) // base)) + remainder
        return tuple(parts), replica

    def coordinate(self, parts: Sequence[int], replica: int) -> dict[str, int]:
        """Return the coordinate that holds replica `replica` of these parts: the inverse of `of`."""
        coordinate = dict(self.layout.at)
        for axes, digits in reversed(self.digits.items()):
            size = self.mesh.size(*axes)
            replica, remainder = divmod(replica, size // prod(count for _, count, _ in digits))
            joint, base = 0, 1
            for every, count, number in digits:
                remainder, low = divmod(remainder, every // base)
                joint += low * base + parts[number] * every
                base = every * count
            joint += remainder * base
            coordinate |= self.mesh.coordinate_along(axes, joint)
        return coordinate | self.mesh.coordinate_along(self.free, replica)


def find_primary_replica(layout: Layout, parts: Sequence[int], writers: int) -> int:
    """Return the number of the replica that writes a part, which spreads parts over the `writers` first replicas."""
    return (layout.turn + sum(parts)) % writers


@dataclass(frozen=True)
class Registry:
    """All global arrays of the run, on every stage, with the ranks that hold each box."""

    mesh: Mesh
    layouts: dict[str, Layout] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, layouts: Mapping[str, Layout], differs: Iterable[str] = ()) -> Registry:
        """Return a registry that spreads the primary shards, so that all replicas write about equally many bytes.

        differs: value of `Layout.differs` for all arrays.
        """
        apart = tuple(sorted(differs))
        loads: dict[tuple, list[int]] = {}
        spread = {}
        for name, layout in sorted(layouts.items(), key=lambda item: (-item[1].nbytes, item[0])):
            layout = replace(layout, differs=apart) if apart else layout
            places = Places(mesh, layout)
            load = loads.setdefault(places.key, [0] * places.writers)
            turn = min(range(len(load)), key=load.__getitem__)
            load[turn] += layout.nbytes
            spread[name] = replace(layout, turn=turn)
        return cls(mesh, {name: spread[name] for name in layouts})

    def __contains__(self, name: str) -> bool:
        return name in self.layouts

    def __getitem__(self, name: str) -> Layout:
        return self.layouts[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __or__(self, other: Registry) -> Registry:
        """Return the arrays of both registries. Raises ValueError if an array has two layouts."""
        clash = [name for name in other if name in self and self[name] != other[name]]
        if clash:
            raise ValueError(f"two layouts for the same arrays: {', '.join(clash)}")
        return Registry(self.mesh, {**self.layouts, **other.layouts})

    def add_like(self, prefix: str, names: Iterable[str], dtype: str | None = None) -> Registry:
        """Return a registry with an array `prefix/<rest>` for each ``model/<rest>`` in `names`, both sharded alike."""
        layouts = {}
        for name in names:
            layout = self[name]
            layouts[f"{prefix}/{name.split('/', 1)[1]}"] = replace(layout, dtype=dtype or layout.dtype)
        return Registry(self.mesh, layouts)

    def list_boxes(self, name: str) -> list[Box]:
        """Return all boxes of an array, in order; the boxes tile the array."""
        return [box for _, box in self[name].iterate_boxes()]

    def list_rank_boxes(self, name: str, rank: int) -> list[tuple[Box, bool]]:
        """Return (box, whether `rank` is the primary holder) for each box of the array `name` on `rank`."""
        layout, coordinate = self[name], self.mesh.coordinate(rank)
        if any(coordinate[axis] != index for axis, index in layout.at):
            return []
        places = Places(self.mesh, layout)
        parts, replica = places.of(coordinate)
        primary = replica == find_primary_replica(layout, parts, places.writers)
        return [(box, primary) for box in layout.list_boxes(parts)]

    def find_holders(self, name: str, box: Box) -> list[int]:
        """Return the global ranks that hold a box, the primary rank first. Raises LookupError for an unknown box."""
        layout = self[name]
        parts = next((parts for parts, candidate in layout.iterate_boxes() if candidate == box), None)
        if parts is None:
            raise LookupError(f"{name} has no box {box}")
        return self._find_holders(layout, Places(self.mesh, layout), parts)

    def iterate_held(self, name: str) -> Iterator[tuple[Box, list[int]]]:
        """Yield (box, ranks that hold the box, the primary rank first) for every box of an array."""
        layout = self[name]
        places = Places(self.mesh, layout)
        return ((box, self._find_holders(layout, places, parts)) for parts, box in layout.iterate_boxes())

    def _find_holders(self, layout: Layout, places: Places, parts: Sequence[int]) -> list[int]:
        ranks = [self.mesh.rank(places.coordinate(parts, replica)) for replica in range(places.replicas)]
        primary = ranks.pop(find_primary_replica(layout, parts, places.writers))
        return [primary, *sorted(ranks)]

    @cached_property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layouts.values())
