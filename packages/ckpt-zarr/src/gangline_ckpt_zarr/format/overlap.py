"""Stored boxes that overlap a wanted box, found without listing all boxes.

Along each division, the parts that can overlap are a range, found by bisection; their boxes are then checked one by
one. So the work of a rank that loads grows with the boxes it loads, not with the number of ranks that saved.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from math import prod

from gangline.shard import Box, Division, Layout, Registry
from gangline_ckpt_zarr.format.owners import BoxOwners, get_box_owners


def find_stored_boxes(registry: Registry, name: str, wanted: Box) -> Iterator[tuple[int, Box]]:
    """Yield (rank that wrote the box, box) of every stored box of an array that overlaps `wanted`."""
    layout = registry[name]
    owners = get_box_owners(registry.mesh, layout)
    if wanted not in owners.met:
        owners.met[wanted] = [*_find_overlaps(layout, wanted)]
    for parts, boxes in owners.met[wanted]:
        rank = owners.get_writer(parts, layout.turn)
        yield from ((rank, box) for box in boxes)


def iterate_writers(owners: BoxOwners, turn: int) -> Iterator[int]:
    """Yield the ranks that write a part of an array."""
    layout = owners.layout
    whole = Box((0,) * len(layout.shape), layout.shape)
    for parts in _iterate_parts(layout, whole):
        if any(box.size for box in layout.list_boxes(parts)):
            yield owners.get_writer(parts, turn)


def _find_overlaps(layout: Layout, wanted: Box) -> Iterator[tuple[tuple[int, ...], list[Box]]]:
    """Yield (parts, boxes that overlap `wanted`) for each combination of parts with such boxes."""
    for parts in _iterate_parts(layout, wanted):
        boxes = [box for box in layout.list_boxes(parts) if not box.shape or box.intersect(wanted) is not None]
        if boxes:
            yield parts, boxes


def _iterate_parts(layout: Layout, wanted: Box) -> Iterator[tuple[int, ...]]:
    """Yield each combination of parts, one part per division, that can overlap `wanted`."""
    combinations: list[tuple[int, ...]] = [()]
    for number, division in enumerate(layout.divisions):
        outer = Layout(layout.shape, layout.dtype, layout.divisions[:number])
        combinations = [
            (*parts, part) for parts in combinations for part in _find_parts(outer, division, parts, wanted)
        ]
    yield from combinations


def _find_parts(outer: Layout, division: Division, parts: tuple[int, ...], wanted: Box) -> range | list[int]:
    if not division.rows:
        start = wanted.offset[division.dim]
        return _find_touched(division.bounds[0], start, start + wanted.shape[division.dim])
    boxes = outer.list_boxes(parts)
    bounds = division.bounds[_compute_joint_index(outer, parts)] if len(division.bounds) > 1 else division.bounds[0]
    if len(boxes) != 1:  # split over rows twice: rare, with few parts, so return all
        return list(range(division.parts))
    common = boxes[0].intersect(wanted)
    if common is None:
        return []
    first = _compute_row(boxes[0], common.offset)
    last = _compute_row(boxes[0], tuple(a + n - 1 for a, n in zip(common.offset, common.shape, strict=True)))
    return _find_touched(bounds, first, last + 1)


def _compute_joint_index(outer: Layout, parts: tuple[int, ...]) -> int:
    joint = 0
    for division, part in zip(outer.divisions, parts, strict=True):
        joint = joint * division.parts + part
    return joint


def _compute_row(box: Box, place: tuple[int, ...]) -> int:
    """Return the row of `box`, with its leading dims flattened, that contains the element at position `place`."""
    row = 0
    for at, start, length in zip(place[:-1], box.offset, box.shape, strict=False):
        row = row * length + at - start
    return row


def _find_touched(bounds: tuple[int, ...], start: int, stop: int) -> range:
    """Return the numbers of the parts, delimited by `bounds`, that overlap [start, stop)."""
    return range(max(0, bisect_right(bounds, start) - 1), min(len(bounds) - 1, bisect_left(bounds, stop)))


def is_covered(registry: Registry, name: str, wanted: Box) -> bool:
    """Return whether the stored boxes cover `wanted`. Stored boxes never overlap, so counting elements suffices."""
    if not wanted.shape:
        return any(True for _ in find_stored_boxes(registry, name, wanted))
    common = (box.intersect(wanted) for _, box in find_stored_boxes(registry, name, wanted))
    return sum(prod(part.shape) for part in common if part is not None) == wanted.size
