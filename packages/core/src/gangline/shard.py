"""Shards and their registry: the one currency between strategies, optimizers and checkpointers.

A run's state is a set of named global arrays. A `Shard` is the part of one that a rank holds. The `Registry` has, for
every array, which rank holds which box. It is a pure function of plan and mesh, equal on every rank, and its size grows
with arrays and boundaries, not with ranks times arrays: a checkpointer plans from it without communication.

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
MODEL = "model"  # what names of the model's arrays begin with


def name_model_array(parameter: str) -> str:
    """The array that a parameter or buffer of the model is kept as."""
    return f"{MODEL}/{parameter}"


def parse_parameter(array: str) -> str:
    """The inverse of `name_model_array`: the model's own name of the array."""
    return array.removeprefix(f"{MODEL}/")


def is_of_model(array: str) -> bool:
    """Whether it is an array of the model, and not of the optimizer or of a callback."""
    return array.startswith(f"{MODEL}/")


def name_dtype(dtype: torch.dtype) -> str:
    """Return the registry's name of a dtype: "float32"."""
    return str(dtype).removeprefix("torch.")


def get_itemsize(dtype: str) -> int:
    """Bytes of one element; one byte where the name is not listed (bool, uint8, float8)."""
    return ITEMSIZE.get(dtype, 1)


@dataclass(frozen=True, order=True)
class Box:
    """An axis-aligned part of a global array: from `offset`, `shape` long. 0-d: both empty tuples."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def limits(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) along each dim."""
        return tuple((start, start + length) for start, length in zip(self.offset, self.shape, strict=True))

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(start, stop) for start, stop in self.limits)

    def intersect(self, other: Box) -> Box | None:
        """The part both have, in global coordinates."""
        start = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        stop = tuple(
            min(a + n, b + m) for a, n, b, m in zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        )
        if any(b <= a for a, b in zip(start, stop, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, stop, strict=True)))

    def slice_within(self, outer: Box) -> tuple[slice, ...]:
        """Where this box lies in a tensor that holds `outer`."""
        return tuple(
            slice(start - base, start - base + length)
            for start, base, length in zip(self.offset, outer.offset, self.shape, strict=True)
        )


@dataclass
class Shard:
    """This rank holds the box at `offset` of the global array `name`.

    `local` is a writable view, valid until the next step. `primary` is true on exactly one holder of each
    box: the one that writes it. Padding never shows.
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
    """One way an array is cut: parts along `dim` (or over rows), picked by the joint coordinate along `axes`.

    bounds  where parts begin and end: one entry more than there are parts; equal neighbours make an empty part
    every   the rank with joint coordinate i holds part (i // every) % parts. With 2 key-value heads, tp=4 and every=2:
            parts 0, 0, 1, 1. What lies on a fold has every=1 over the axes of the fold, and over the ranks beside it
            every = the fold's size. Ranks that hold the same part are replicas
    rows    bounds count rows of what the earlier divisions left, leading dims flattened (a row runs along the last
            dim); such a part of a stacked array is a few boxes. `bounds` may then depend on the part that the earlier
            divisions gave: there is one tuple for each of those, in joint order
    Two divisions of an array have the same axes, or none in common. Example: an array (4, 6), split in halves over tp=4
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
    """How one global array lies over the mesh.

    `at` fixes coordinates (a pipeline stage: {"pp": 2}); axes that neither `at` nor a division
    names hold replicas, of which number `turn` (plus the box's number) is primary. `differs` names those of these axes
    along which replicas hold other values between synchronisations: the first rank along them is primary.
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
        """Every boundary along each dim, both ends included."""
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
        """The boxes of the holder of these parts, one part for each division."""
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
        """Every box of the array with the parts of its holders, in order."""
        for parts in product(*(range(division.parts) for division in self.divisions)):
            for box in self.list_boxes(parts):
                yield parts, box


def _cut_along(box: Box, dim: int, start: int, stop: int) -> Box | None:
    """The part of `box` between `start` and `stop` (global coordinates) along `dim`."""
    slab = Box(
        box.offset[:dim] + (start,) + box.offset[dim + 1 :], box.shape[:dim] + (stop - start,) + box.shape[dim + 1 :]
    )
    return box.intersect(slab)


def _take_rows(boxes: list[Box], start: int, stop: int) -> list[Box]:
    """Rows `start` to `stop` of `boxes`, numbered through all of them; rows past the last are padding."""
    row_boxes: list[Box] = []
    for box in boxes:
        rows = prod(box.shape[:-1])
        if max(start, 0) < min(stop, rows):
            row_boxes += _cut_rows(box, max(start, 0), min(stop, rows))
        start, stop = start - rows, stop - rows
    return row_boxes


def _cut_rows(box: Box, start: int, stop: int) -> list[Box]:
    """Rows `start` to `stop` > `start` of `box`, its leading dims flattened, as the fewest boxes in order."""
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
    """Which part of an array, and which replica of it, a place on the mesh holds.

    Along each tuple of axes that divisions use, the joint coordinate is a mixed-radix number. A division reads one of
    its digits; the other digits, and the axes that no division names, count replicas. In the example of `Division`:
    `of({"dp_shard": 1, "tp": 3})` is ((1, 1), 1): parts (1, 1), replica 1. Replica 0 is at dp_shard=1, tp=2.
    """

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.mesh, self.layout = mesh, layout
        fixed = dict(layout.at)
        free = [axis for axis in mesh.axes if axis not in layout.cut_axes and axis not in fixed]
        self.free = tuple(sorted(free, key=lambda axis: axis not in layout.differs))  # the first replicas come first
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
        """Equal for arrays whose replicas lie on the same ranks."""
        return (
            self.layout.at,
            self.free,
            self.writers,
            tuple((axes, tuple(digits)) for axes, digits in self.digits.items()),
        )

    def of(self, coordinate: Coordinate) -> tuple[tuple[int, ...], int]:
        """(the part for each division, the number of the replica)."""
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
        """The inverse of `of`: the coordinate of the place that holds these parts as that replica."""
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
    """The number of the replica that writes a part: spread over the first `Places.writers`."""
    return (layout.turn + sum(parts)) % writers


@dataclass(frozen=True)
class Registry:
    """Every global array of the run, on whatever stage, and who holds which box of it."""

    mesh: Mesh
    layouts: dict[str, Layout] = field(default_factory=dict)

    @classmethod
    def of(cls, mesh: Mesh, layouts: Mapping[str, Layout], differs: Iterable[str] = ()) -> Registry:
        """A registry whose primaries are spread so that the replicas of an array write equal bytes.

        differs: the axes of `Layout.differs`, for all arrays.
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
        """The arrays of both; one that is in both must have the same layout in both."""
        clash = [name for name in other if name in self and self[name] != other[name]]
        if clash:
            raise ValueError(f"two layouts for the same arrays: {', '.join(clash)}")
        return Registry(self.mesh, {**self.layouts, **other.layouts})

    def add_like(self, prefix: str, names: Iterable[str], dtype: str | None = None) -> Registry:
        """Arrays `prefix/<rest>` with the boxes of `model/<rest>`, for each of `names` (given as ``model/<rest>``)."""
        layouts = {}
        for name in names:
            layout = self[name]
            layouts[f"{prefix}/{name.split('/', 1)[1]}"] = replace(layout, dtype=dtype or layout.dtype)
        return Registry(self.mesh, layouts)

    def list_boxes(self, name: str) -> list[Box]:
        """All primary boxes of an array, in order: they tile it."""
        return [box for _, box in self[name].iterate_boxes()]

    def list_rank_boxes(self, name: str, rank: int) -> list[tuple[Box, bool]]:
        """The boxes of `name` that a rank holds, each with whether it is their primary."""
        layout, coordinate = self[name], self.mesh.coordinate(rank)
        if any(coordinate[axis] != index for axis, index in layout.at):
            return []
        places = Places(self.mesh, layout)
        parts, replica = places.of(coordinate)
        primary = replica == find_primary_replica(layout, parts, places.writers)
        return [(box, primary) for box in layout.list_boxes(parts)]

    def find_holders(self, name: str, box: Box) -> list[int]:
        """The global ranks that hold all of a primary box, the primary first. Raises LookupError for any other box."""
        layout = self[name]
        parts = next((parts for parts, candidate in layout.iterate_boxes() if candidate == box), None)
        if parts is None:
            raise LookupError(f"{name} has no box {box}")
        return self._find_holders(layout, Places(self.mesh, layout), parts)

    def iterate_held(self, name: str) -> Iterator[tuple[Box, list[int]]]:
        """Every primary box of an array with its holders, as `boxes` and `find_holders` say them."""
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
