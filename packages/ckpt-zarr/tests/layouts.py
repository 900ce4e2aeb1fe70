"""Hypothesis strategies for the tests: arrays of any shape, sharded in any way that a registry supports."""

from __future__ import annotations

from math import prod

from hypothesis import strategies as st

from gangline.mesh import Mesh
from gangline.shard import Division, Layout, Registry

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
DTYPES = ("float32", "float32", "float64", "bfloat16", "int64", "bool", "float16")


@st.composite
def bounds(draw, length: int, parts: int, grain: int = 1) -> tuple[int, ...]:
    """Draw boundaries of `parts` parts of `length`; parts may be empty, inner boundaries are multiples of `grain`."""
    inner = draw(st.lists(st.integers(0, length // grain), min_size=parts - 1, max_size=parts - 1))
    return (0, *sorted(grain * at for at in inner), length)


@st.composite
def layouts(draw, mesh: Mesh) -> Layout:
    shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
    free = [axis for axis in AXES if mesh.size(axis) > 1]
    at: tuple[tuple[str, int], ...] = ()
    if "pp" in free and draw(st.booleans()):
        free.remove("pp")
        at = (("pp", draw(st.integers(0, mesh.size("pp") - 1))),)
    divisions: list[Division] = []
    for dim in range(len(shape)):
        if free and draw(st.integers(0, 2)) == 0:
            axis = free.pop(draw(st.integers(0, len(free) - 1)))
            grain = draw(st.sampled_from([1, 2, 3]))
            divisions.append(Division((axis,), (draw(bounds(shape[dim], mesh.size(axis), grain)),), dim))
    if len(shape) > 1 and free and draw(st.booleans()):
        axis = free.pop()
        outer = Layout(shape, "float32", tuple(divisions))
        each = []
        for parts in _joint([division.parts for division in divisions]):
            rows = sum(prod(box.shape[:-1]) for box in outer.list_boxes(parts))
            each.append(draw(bounds(rows, mesh.size(axis), draw(st.sampled_from([1, 2])))))
        divisions.append(Division((axis,), tuple(each), rows=True))
    return Layout(shape, draw(st.sampled_from(DTYPES)), tuple(divisions), at)


def _joint(counts: list[int]) -> list[tuple[int, ...]]:
    found: list[tuple[int, ...]] = [()]
    for count in counts:
        found = [(*parts, part) for parts in found for part in range(count)]
    return found


@st.composite
def meshes(draw, most: int = 12) -> Mesh:
    sizes: dict[str, int] = {}
    for axis in AXES:
        left = most // prod(sizes.values())
        sizes[axis] = draw(st.integers(1, max(1, min(3, left))))
    return Mesh.of(sizes)


@st.composite
def registries(draw, most: int = 12) -> Registry:
    mesh = draw(meshes(most))
    found = draw(st.lists(layouts(mesh), min_size=1, max_size=4))
    return Registry.of(mesh, {f"model/part.{number}": layout for number, layout in enumerate(found)})
