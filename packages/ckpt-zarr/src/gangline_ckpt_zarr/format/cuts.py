"""How arrays were cut, as compact JSON: distinct cuts once, even bounds as three numbers.

It is the registry's content, from which every file, offset and owner follows. Its size grows with arrays and
boundaries, not with ranks times arrays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry


def to_json(registry: Registry) -> dict[str, Any]:
    """{"mesh": {axis: size}, "cuts": [...], "arrays": {name: [number of its cut, turn]}}."""
    numbers: dict[tuple, int] = {}
    arrays = {}
    for name, layout in registry.layouts.items():
        number = numbers.setdefault((layout.at, layout.divisions), len(numbers))
        arrays[name] = [number, layout.turn]
    cuts = [
        {"at": dict(at), "divisions": [_division_to_json(division) for division in divisions]}
        for at, divisions in numbers
    ]
    return {"mesh": dict(registry.mesh.sizes), "cuts": cuts, "arrays": arrays}


def of_json(content: Mapping[str, Any], shapes: Mapping[str, tuple[tuple[int, ...], str]]) -> Registry:
    """The registry; `shapes`: each array's (shape, torch's dtype)."""
    cuts = [
        (tuple(cut["at"].items()), tuple(_division_of_json(division) for division in cut["divisions"]))
        for cut in content["cuts"]
    ]
    layouts = {}
    for name, (number, turn) in content["arrays"].items():
        at, divisions = cuts[number]
        layouts[name] = Layout(*shapes[name], divisions, at, turn)
    return Registry(Mesh.of(content["mesh"]), layouts)


def _division_to_json(division: Division) -> dict[str, Any]:
    bounds = division.bounds[:1] if len(set(division.bounds)) == 1 else division.bounds
    found: dict[str, Any] = {"axes": division.axes, "bounds": [_bounds_to_json(one) for one in bounds]}
    if division.dim:
        found["dim"] = division.dim
    if division.rows:
        found["rows"] = True
    if division.every != 1:
        found["every"] = division.every
    return found


def _division_of_json(content: Mapping[str, Any]) -> Division:
    bounds = tuple(_bounds_of_json(one) for one in content["bounds"])
    return Division(
        tuple(content["axes"]), bounds, content.get("dim", 0), content.get("rows", False), content.get("every", 1)
    )


def _bounds_to_json(bounds: tuple[int, ...]) -> list[int] | dict[str, int]:
    """The bounds themselves, or {"step", "end", "parts"} of what is cut every `step` from 0 to `end`."""
    step, end, parts = (bounds[1] if len(bounds) > 1 else 0), bounds[-1], len(bounds) - 1
    if parts > 2 and bounds == _even(step, end, parts):
        return {"step": step, "end": end, "parts": parts}
    return list(bounds)


def _bounds_of_json(content: Any) -> tuple[int, ...]:
    return _even(**content) if isinstance(content, dict) else tuple(content)


def _even(step: int, end: int, parts: int) -> tuple[int, ...]:
    return tuple(min(end, step * part) for part in range(parts + 1))
