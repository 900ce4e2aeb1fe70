"""Shard registry, compared with brute force: holders and one primary for every element of every array."""

from __future__ import annotations

from itertools import product
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from gangline.mesh import AXES, Mesh
from gangline.shard import Box, Division, Layout, Registry

meshes = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}).map(Mesh.of)


def bounds_of(draw, length, parts):
    """Draw arbitrary boundaries, which may include parts of length 0."""
    inner = sorted(draw(st.lists(st.integers(0, length), min_size=parts - 1, max_size=parts - 1)))
    return (0, *inner, length)


def digits(draw, size):
    """Draw (every, parts) of divisions that use zero, one or two digits of a number below `size`."""
    found, base = [], 1
    for _ in range(draw(st.integers(0, 2))):
        every = base * draw(st.sampled_from([n for n in range(1, size // base + 1) if size // base % n == 0]))
        parts = draw(st.sampled_from([n for n in range(1, size // every + 1) if size // every % n == 0]))
        found.append((every, parts))
        base = every * parts
    return draw(st.permutations(found))


@st.composite
def layouts(draw, mesh, shape=None):
    """Draw a layout: perhaps on one stage, sharded along some dims by digits of some axes, and perhaps over rows."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))) if shape is None else shape
    axes = draw(st.permutations(AXES))
    at = ()
    if draw(st.booleans()):
        axis = axes.pop()
        at = ((axis, draw(st.integers(0, mesh.size(axis) - 1))),)
    divisions = []
    while axes and shape:
        along = tuple(axes.pop() for _ in range(draw(st.integers(1, min(3, len(axes))))))
        for every, parts in digits(draw, mesh.size(*along)):
            dim = draw(st.integers(0, len(shape) - 1))
            if any(division.dim == dim for division in divisions):
                continue
            divisions.append(Division(along, (bounds_of(draw, shape[dim], parts),), dim=dim, every=every))
    if len(shape) > 1 and divisions and draw(st.booleans()):
        last = divisions.pop()
        layout = Layout(shape, divisions=tuple(divisions))
        by_part = []
        for parts in product(*(range(division.parts) for division in divisions)):
            rows = sum(prod(box.shape[:-1]) for box in layout.list_boxes(parts))
            by_part.append(bounds_of(draw, rows, last.parts))
        divisions.append(Division(last.axes, tuple(by_part), rows=True, every=last.every))
    return Layout(shape, "float32", tuple(divisions), at)


registries = meshes.flatmap(
    lambda mesh: st.lists(layouts(mesh), min_size=1, max_size=4).map(
        lambda made: Registry.of(mesh, {f"model/{i}": layout for i, layout in enumerate(made)})
    )
)


@settings(deadline=None)
@given(registries)
def test_primary_boxes_tile_each_array(registry):
    for name in registry:
        written = np.zeros(registry[name].shape, dtype=int)
        for rank in range(registry.mesh.world):
            for box, primary in registry.list_rank_boxes(name, rank):
                assert all(length > 0 for length in box.shape)
                written[box.slices] += primary
        assert (written == 1).all()
        tiles = np.zeros(registry[name].shape, dtype=int)
        for box in registry.list_boxes(name):
            tiles[box.slices] += 1
        assert (tiles == 1).all()


@settings(deadline=None)
@given(registries)
def test_holders_match_boxes_of_each_rank(registry):
    for name in registry:
        held = {}
        for rank in range(registry.mesh.world):
            for box, primary in registry.list_rank_boxes(name, rank):
                ranks = held.setdefault(box, [])
                ranks.insert(0, rank) if primary else ranks.append(rank)
        assert {box: registry.find_holders(name, box) for box in registry.list_boxes(name)} == held
        assert dict(registry.iterate_held(name)) == {
            box: registry.find_holders(name, box) for box in registry.list_boxes(name)
        }


@settings(deadline=None)
@given(registries)
def test_boundaries_include_every_box_edge(registry):
    for name in registry:
        boundaries = registry[name].list_boundaries()
        for box in registry.list_boxes(name):
            for dim, (start, length) in enumerate(zip(box.offset, box.shape, strict=True)):
                assert {start, start + length} <= set(boundaries[dim])


@settings(deadline=None)
@given(st.data())
def test_array_written_in_one_layout_reads_in_any(data):
    writer_mesh, reader_mesh = data.draw(meshes), data.draw(meshes)
    writer = Registry.of(writer_mesh, {"a": data.draw(layouts(writer_mesh))})
    shape = writer["a"].shape
    array = np.arange(prod(shape)).reshape(shape)
    stored = {}
    for rank in range(writer_mesh.world):
        stored |= {box: array[box.slices] for box, primary in writer.list_rank_boxes("a", rank) if primary}
    reader = Registry.of(reader_mesh, {"a": data.draw(layouts(reader_mesh, shape))})
    for rank in range(reader_mesh.world):
        for box, _ in reader.list_rank_boxes("a", rank):
            local = np.full(box.shape, -1)
            for have, values in stored.items():
                if (both := box.intersect(have)) is not None:
                    local[both.slice_within(box)] = values[both.slice_within(have)]
            assert (local == array[box.slices]).all()


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=40), st.integers(1, 8))
def test_replicas_share_writes_evenly(sizes, width):
    registry = Registry.of(
        Mesh.of({"dp_replicate": width}), {f"model/{i}": Layout((size,)) for i, size in enumerate(sizes)}
    )
    load = [
        sum(
            registry[name].nbytes for name in registry for _, primary in registry.list_rank_boxes(name, rank) if primary
        )
        for rank in range(width)
    ]
    assert sum(load) == registry.nbytes
    assert max(load) - min(load) <= 4 * max(sizes)


def test_registry_is_independent_of_array_order():
    mesh = Mesh.of({"dp_replicate": 3})
    arrays = {f"model/{i}": Layout((i % 5 + 1, 7)) for i in range(20)}
    again = Registry.of(mesh, dict(reversed(arrays.items())))
    assert Registry.of(mesh, arrays).layouts == again.layouts


def test_axis_is_sharded_by_fold_and_across_folds():
    mesh = Mesh.of({"dp_shard": 8})
    on_fold, beside = Division(("dp_shard",), ((0, 3, 6),)), Division(("dp_shard",), ((0, 1, 2, 3, 4),), 1, every=2)
    registry = Registry.of(mesh, {"x": Layout((6, 4), divisions=(on_fold, beside))})
    assert [registry.list_rank_boxes("x", rank)[0][0].offset for rank in range(8)] == [
        (3 * (rank % 2), rank // 2) for rank in range(8)
    ]
    shared = Registry.of(mesh, {"x": Layout((6, 4), divisions=(Division(("dp_shard",), ((0, 3, 6),), every=4),))})
    assert sorted(shared.find_holders("x", Box((3, 0), (3, 4)))) == [4, 5, 6, 7]


def test_row_range_of_stack_is_split_into_boxes():
    """Split rows [2, 9) of 3 matrices of 4 rows: the end of the first, the complete second, the start of the third."""
    layout = Layout((3, 4, 5), divisions=(Division(("dp_shard",), ((0, 2, 9, 12),), rows=True),))
    assert layout.list_boxes([1]) == [
        Box((0, 2, 0), (1, 2, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 1, 5)),
    ]


def test_padded_rows_are_not_in_boxes():
    """Use ranges that extend beyond the last row, as in a padded bucket."""
    for shape in ((10, 3), (2, 5, 3), (2, 5, 1, 3)):
        layout = Layout(shape, divisions=(Division(("dp_shard",), ((0, 4, 8, 12, 16),), rows=True),))
        rows = [sum(prod(box.shape[:-1]) for box in layout.list_boxes([part])) for part in range(4)]
        assert rows == [4, 4, 2, 0]


def test_registry_add_like_and_union_combine_layouts():
    registry = Registry.of(Mesh.of({"dp_replicate": 2}), {"model/a": Layout((2, 3)), "model/b": Layout((4,))})
    state = registry.add_like("optimizer/m", ["model/a"], "bfloat16")
    assert list(state) == ["optimizer/m/a"]
    assert state["optimizer/m/a"].turn == registry["model/a"].turn
    assert (registry | state).nbytes == 24 + 16 + 12
    with pytest.raises(ValueError, match="two layouts for the same arrays: model/a"):
        registry | Registry.of(registry.mesh, {"model/a": Layout((2, 4))})


def test_unheld_box_raises_lookup_error():
    registry = Registry.of(Mesh.of({}), {"model/a": Layout((2, 3))})
    with pytest.raises(LookupError, match="model/a has no box"):
        registry.find_holders("model/a", Box((0, 0), (1, 3)))


def test_a_registry_of_16384_ranks_answers_at_once():
    """Use 1,000 arrays sharded over 8 and 128 ranks: the cost grows with arrays and boundaries, not with ranks."""
    mesh = Mesh.of({"pp": 16, "dp_shard": 128, "tp": 8})
    columns = Division(("tp",), (tuple(range(0, 16_385, 2048)),), dim=0)
    rows = Division(("dp_shard",), (tuple(range(0, 2049, 16)),), rows=True)
    registry = Registry.of(
        mesh, {f"model/{i}": Layout((16_384, 128), "float32", (columns, rows), (("pp", i % 16),)) for i in range(1000)}
    )
    (box, primary), *more = registry.list_rank_boxes("model/17", mesh.rank({"pp": 1, "dp_shard": 3, "tp": 5}))
    assert (box, primary, more) == (Box((5 * 2048 + 48, 0), (16, 128)), True, [])
    assert registry.find_holders("model/17", box) == [mesh.rank({"pp": 1, "dp_shard": 3, "tp": 5})]
    assert registry.list_rank_boxes("model/17", 0) == []
