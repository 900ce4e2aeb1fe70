"""Validation of zarr.json: ranks, layouts, shapes and chunks that cannot exist are refused. Raises ValueError.

A checksum shows that a text is unchanged, not that its content is possible. So every number is checked before it is
used: no loop and no allocation grows with an unchecked number.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from gangline.mesh import Mesh
from gangline.shard import Division, Layout

DEEPEST = 64  # maximum nesting depth of dicts and lists in a document
MOST_DIMS = 32
MOST_PARTS = 1 << 20  # maximum number of parts into which an array is sharded
MOST_BOUNDS = 1 << 22  # maximum number of bounds in all distinct layouts together
MOST_RANKS = 1 << 40
LARGEST = 1 << 60  # maximum length of a dim, and maximum number of elements of an array


def number(value: Any, what: str, low: int = 0, high: int = LARGEST) -> int:
    """Return an integer from `low` to `high`, both included. Raises ValueError."""
    if type(value) is not int:
        raise ValueError(f"{what} is {_shorten(value)}, not an integer")
    if not low <= value <= high:
        raise ValueError(f"{what} is {_shorten(value)}, not between {low} and {high}")
    return value


def parse_numbers(value: Any, what: str, low: int = 0, most: int = MOST_DIMS) -> tuple[int, ...]:
    """Return a list of up to `most` integers, none below `low`, as a tuple. Raises ValueError."""
    if not isinstance(value, list) or len(value) > most:
        raise ValueError(f"{what} is {_shorten(value)}, not a list of up to {most} numbers")
    return tuple(number(one, what, low) for one in value)


def parse_mapping(value: Any, what: str) -> dict[str, Any]:
    """Return a JSON object. Raises ValueError."""
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {_shorten(value)}, not a JSON object")
    return value


def name(text: str) -> str:
    """Return `text` if it can name an array: a relative path without "." and "..". Raises ValueError."""
    if not all(part not in ("", ".", "..") for part in text.split("/")) or "\0" in text or "\\" in text:
        raise ValueError(f"{text!r} is not a valid array name")
    return text


def parse_axes(value: Any) -> tuple[str, ...]:
    """Return names of mesh axes. Raises ValueError."""
    if not isinstance(value, list) or len(value) > MOST_DIMS or not all(isinstance(axis, str) for axis in value):
        raise ValueError(f"{_shorten(value)} is not a list of mesh axes")
    return tuple(value)


def check_depth(content: Any) -> None:
    """Raise ValueError if `content` is nested deeper than `DEEPEST`, so that readers might fail."""
    level, below = 0, [content]
    while below:
        if level > DEEPEST:
            raise ValueError(f"the JSON is nested more than {DEEPEST} levels deep")
        nested = [one for one in below if isinstance(one, dict | list)]
        below = [item for one in nested for item in (one.values() if isinstance(one, dict) else one)]
        level += 1


def parse_mesh(content: Any) -> Mesh:
    sizes = {axis: number(size, f"mesh axis {axis}", 1) for axis, size in parse_mapping(content, "the mesh").items()}
    number(prod(sizes.values()), "the number of ranks", 1, MOST_RANKS)
    return Mesh.of(sizes)


def parse_shape(value: Any, of: str) -> tuple[int, ...]:
    shape = parse_numbers(value, f"the shape of {of}")
    number(prod(shape), f"the size of {of}")
    return shape


def chunk(value: Any, layout: Layout, of: str) -> tuple[int, ...]:
    """Return a chunk shape. Raises ValueError if chunks exceed the array, or if a shard boundary is inside a chunk.

    The boundaries of a division over rows are checked only in a matrix with no other division.
    """
    shape = parse_numbers(value, f"the chunk shape of {of}", 1)
    if len(shape) != len(layout.shape) or any(c > max(1, n) for c, n in zip(shape, layout.shape, strict=True)):
        raise ValueError(f"the chunks of {of} have shape {shape}, which does not fit the array's shape {layout.shape}")
    for division in layout.divisions:
        if not division.rows:
            side, length, bounds = shape[division.dim], layout.shape[division.dim], division.bounds[0]
        elif len(layout.shape) == 2 and len(layout.divisions) == 1:
            side, length, bounds = shape[0], layout.shape[0], division.bounds[0]
        else:
            continue
        if any(bound % side and bound != length for bound in bounds):
            raise ValueError(f"a shard boundary of {of} is inside a chunk")
    return shape


def check_layout(layout: Layout, mesh: Mesh, of: str) -> None:
    """Raise ValueError if an array of this shape cannot be sharded like this over this mesh."""
    fixed = dict(layout.at)
    for axis, index in layout.at:
        if axis not in mesh.axes:
            raise ValueError(f"{of} is placed on {axis}, which is not a mesh axis")
        number(index, f"the coordinate of {of} on {axis}", 0, mesh.size(axis) - 1)
    digits: dict[tuple[str, ...], list[tuple[int, int]]] = {}
    earlier = 1
    for division in layout.divisions:
        axes = division.axes
        others = {axis for other_axes in digits if other_axes != axes for axis in other_axes} | {*fixed}
        if len({*axes}) != len(axes) or not {*axes} <= {*mesh.axes} - others:
            raise ValueError(
                f"{of} cannot be sharded along {', '.join(axes)}: an axis is unknown, repeated or already used"
            )
        digits.setdefault(axes, []).append((division.every, division.parts))
        _check_division_bounds(layout, division, earlier, of)
        earlier *= division.parts
        number(earlier, f"the number of parts of {of}", 1, MOST_PARTS)
    for axes, pairs in digits.items():
        base, size = 1, mesh.size(*axes)
        for every, parts in sorted(pairs):
            if every % base:
                raise ValueError(f"the divisions of {of} along {', '.join(axes)} are inconsistent")
            base = every * parts
        if size % base:
            raise ValueError(f"the number of parts of {of} does not divide the {size} ranks along {', '.join(axes)}")


def _check_division_bounds(layout: Layout, division: Division, earlier: int, of: str) -> None:
    length: int | None = None
    if not division.rows:
        if division.dim >= len(layout.shape):
            raise ValueError(f"{of} is sharded along dim {division.dim}, which does not exist")
        length = layout.shape[division.dim]
    elif earlier == 1:
        length = prod(layout.shape[:-1])
    if len(division.bounds) != 1 and (len(division.bounds) != earlier or not division.rows):
        raise ValueError(f"{of} has {len(division.bounds)} lists of bounds for {earlier} parts")
    for bounds in division.bounds:
        if length is not None and bounds[-1] != length:
            raise ValueError(f"the bounds of {of} end at {bounds[-1]}, but its length is {length}")


def parse_bounds(found: Sequence[int]) -> tuple[int, ...]:
    """Return bounds that start at 0 and never decrease. Raises ValueError."""
    if len(found) < 2 or found[0] != 0 or any(after < before for before, after in pairwise(found)):
        raise ValueError("bounds must start at 0 and never decrease")
    return tuple(found)


def parse_identity(document: Mapping[str, Any]) -> tuple[int, int]:
    """Return (step, attempt) of a document. Raises ValueError."""
    return number(document.get("step"), "the step"), number(document.get("attempt"), "the attempt", 1)


def _shorten(value: Any) -> str:
    text = repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
    return text if len(text) <= 40 else f"{text[:37]}..."
