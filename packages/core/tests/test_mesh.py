"""Mesh: ranks, coordinates, groups of an axis, invalid axes."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from gangline.mesh import AXES, Mesh

meshes = st.fixed_dictionaries({axis: st.integers(1, 4) for axis in AXES}).map(Mesh.of)
axis_sets = st.lists(st.sampled_from(AXES), unique=True).map(tuple)


@given(meshes, st.data())
def test_rank_and_coordinate_are_inverse(mesh, data):
    rank = data.draw(st.integers(0, mesh.world - 1))
    coordinate = mesh.coordinate(rank)
    assert mesh.rank(coordinate) == rank
    assert list(coordinate) == list(AXES)
    assert all(0 <= coordinate[axis] < mesh.size(axis) for axis in AXES)


@given(meshes, axis_sets, st.data())
def test_groups_partition_the_world(mesh, axes, data):
    groups = {tuple(mesh.group(rank, axes)) for rank in range(mesh.world)}
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world))
    assert all(len(group) == mesh.size(*axes) for group in groups)
    rank = data.draw(st.integers(0, mesh.world - 1))
    assert mesh.group(rank, axes)[mesh.index(mesh.coordinate(rank), axes)] == rank


def test_neighbours_are_on_the_fastest_axis():
    mesh = Mesh.of({"tp": 2, "pp": 3, "dp_shard": 2})
    assert mesh.axes == AXES
    assert mesh.world == 12
    assert mesh.group(0, ("tp",)) == [0, 1]
    assert mesh.group(0, ("dp_shard",)) == [0, 2]
    assert mesh.group(5, ("pp",)) == [1, 5, 9]
    assert mesh.group(0, ("dp_shard", "tp")) == [0, 1, 2, 3]
    assert mesh.group(0, ("tp", "dp_shard")) == [0, 2, 1, 3]
    assert mesh.size("dp_shard", "tp", "imagined") == 4


def test_coordinate_is_computed_in_large_mesh():
    mesh = Mesh.of({"pp": 16, "dp_shard": 128, "tp": 8})
    assert mesh.coordinate(16_383) == {"pp": 15, "dp_replicate": 0, "dp_shard": 127, "cp": 0, "tp": 7}


@pytest.mark.parametrize(
    ("sizes", "message"), [({"zp": 2}, "no such mesh axes: zp; the axes are pp"), ({"tp": 0}, "not tp=0")]
)
def test_invalid_mesh_axis_is_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        Mesh.of(sizes)
