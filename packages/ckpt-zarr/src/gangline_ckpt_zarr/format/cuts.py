"""Layouts of arrays as compact JSON: each distinct layout once, evenly spaced bounds as three numbers.

The JSON is the content of the registry, from which every file, every offset and the writer of each box follow. Its
size grows with arrays and boundaries, not with ranks times arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.shard import Division, Layout, Registry
from gangline_ckpt_zarr.format import claims


def to_json(registry: Registry) -> dict[str, Any]:
    """Encode a registry: {"mesh": {axis: size}, "cuts": [...], "arrays": {name: [index in cuts, turn]}}."""
    numbers: dict[tuple, int] = {}
    arrays = {}
    for name, layout in registry.layouts.items():
        number = numbers.setdefault((layout.at, layout.divisions, layout.differs), len(numbers))
        arrays[name] = [number, layout.turn]
    cuts = [
        {"at": dict(at), "divisions": [_encode_division(division) for division in divisions]}
        | ({"differs": list(differs)} if differs else {})
        for at, divisions, differs in numbers
    ]
    return {"mesh": dict(registry.mesh.sizes), "cuts": cuts, "arrays": arrays}


def parse_registry(content: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Registry:
    """Return the registry; `shapes`: each array's (shape, torch dtype). Raises ValueError for impossible content."""
    mesh, bounds = claims.parse_mesh(content["mesh"]), Bounds()
    cuts = [
        (
            tuple((axis, claims.number(index, f"a coordinate on {axis}")) for axis, index in cut["at"].items()),
            tuple(_parse_division(division, bounds) for division in cut["divisions"]),
            claims.parse_axes(cut.get("differs", [])),
        )
        for cut in content["cuts"]
    ]
    if claims.parse_mapping(content["arrays"], "the list of sharded arrays").keys() != shapes.keys():
        raise ValueError("the arrays in the layout differ from the arrays in zarr's metadata")
    layouts: dict[str, Layout] = {}
    fitting: set[tuple[int, tuple[int, ...]]] = set()
    for name, entry in content["arrays"].items():
        number, turn = claims.parse_numbers(entry, f"the layout index of {name}", most=2)
        at, divisions, differs = cuts[number]
        layout = layouts[claims.name(name)] = Layout(*shapes[name], divisions, at, turn, differs)
        if (number, layout.shape) not in fitting:
            claims.check_layout(layout, mesh, name)
            fitting.add((number, layout.shape))
    return Registry(mesh, layouts)


def check(registry: Registry) -> None:
    """Raise ValueError if this registry could be written but not read back."""
    keys: set[tuple] = set()
    for name, layout in registry.layouts.items():
        claims.name(name)
        key = layout.shape, layout.divisions, layout.at
        if key not in keys:
            claims.check_layout(layout, registry.mesh, name)
            keys.add(key)


def _encode_division(division: Division) -> dict[str, Any]:
    bounds = division.bounds[:1] if len(set(division.bounds)) == 1 else division.bounds
    content: dict[str, Any] = {"axes": division.axes, "bounds": [_encode_bounds(one) for one in bounds]}
    if division.dim:
        content["dim"] = division.dim
    if division.rows:
        content["rows"] = True
    if division.every != 1:
        content["every"] = division.every
    return content


def _parse_division(content: Mapping[str, Any], bounds: Bounds) -> Division:
    axes, rows = claims.parse_axes(content["axes"]), content.get("rows", False)
    if type(rows) is not bool:
        raise ValueError("'rows' of a division must be true or false")
    division_bounds = tuple(bounds.parse(one) for one in content["bounds"])
    if not division_bounds or len({len(one) for one in division_bounds}) != 1:
        raise ValueError("the lists of bounds of a division are missing or differ in length")
    dim, every = claims.number(content.get("dim", 0), "a dim"), claims.number(content.get("every", 1), "every", 1)
    return Division(axes, division_bounds, dim, rows, every)


def _encode_bounds(bounds: tuple[int, ...]) -> list[int] | dict[str, int]:
    """Return the bounds as a list, or as {"step", "end", "parts"} if they are every `step` from 0 to `end`."""
    step, end, parts = (bounds[1] if len(bounds) > 1 else 0), bounds[-1], len(bounds) - 1
    if parts > 2 and bounds == _split_evenly(step, end, parts):
        return {"step": step, "end": end, "parts": parts}
    return list(bounds)


class Bounds:
    """Parser of one document's bounds: builds evenly spaced bounds once, accepts at most `MOST_BOUNDS` in total."""

    def __init__(self) -> None:
        self._even: dict[tuple[int, int, int], tuple[int, ...]] = {}
        self._count = 0

    def parse(self, content: Any) -> tuple[int, ...]:
        if not isinstance(content, dict):
            self._count_more(len(content))
            return claims.parse_bounds(claims.parse_numbers(content, "bounds", most=claims.MOST_PARTS + 1))
        key = (
            claims.number(content["step"], "the step between bounds"),
            claims.number(content["end"], "the end of bounds"),
            claims.number(content["parts"], "the number of parts", 1, claims.MOST_PARTS),
        )
        if key not in self._even:
            self._count_more(key[2])
            self._even[key] = claims.parse_bounds(_split_evenly(*key))
        return self._even[key]

    def _count_more(self, count: int) -> None:
        self._count = claims.number(self._count + count, "the number of bounds", 0, claims.MOST_BOUNDS)


def _split_evenly(step: int, end: int, parts: int) -> tuple[int, ...]:
    return tuple(min(end, step * part) for part in range(parts + 1))
