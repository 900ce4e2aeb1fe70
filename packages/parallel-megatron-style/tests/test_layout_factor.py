"""Axis sizes from a number of ranks: factorization, given sizes, messages for impossible layouts."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given, strategies as st

from gangline.config.ranges import find_divisors
from gangline.errors import UserError
from gangline.mesh import AXES
from gangline_parallel_megatron_style.config import AxesConfig, Fsdp, Hsdp, Pp, ThreeD, Tp
from gangline_parallel_megatron_style.layout.factor import derive_axis_sizes, find_nearest

PARTS = (ThreeD, Fsdp, Hsdp, Tp, Pp)
small = st.integers(1, 12)
named = st.fixed_dictionaries({}, optional={axis: st.integers(1, 6) for axis in AXES})


@given(st.integers(1, 5000))
def test_find_divisors_returns_all_divisors(number):
    assert find_divisors(number) == [d for d in range(1, number + 1) if number % d == 0]


def test_find_nearest_compares_ratios():
    assert find_nearest(8, [1, 2, 6, 100]) == [2, 6]
    assert find_nearest(10, [1, 5, 40], 1) == [5]


@given(st.sampled_from(PARTS), st.integers(1, 4096))
def test_unset_axes_fill_the_world_size(part, world):
    sizes = part().size_axes(world)
    assert prod(sizes.values()) == world
    assert tuple(sizes) == AXES


@given(st.sampled_from(PARTS), named, st.integers(1, 64))
def test_size_axes_keeps_given_sizes_or_refuses(part, sizes, world):
    config = part(**sizes)
    left, remainder = divmod(world, prod(sizes.values()))
    possible = not remainder and (left == 1 or any(axis not in sizes for axis in part.TAKERS))
    if possible:
        found = config.size_axes(world)
        assert prod(found.values()) == world
        assert {axis: found[axis] for axis in sizes} == sizes
    else:
        with pytest.raises(UserError, match=f"does not fit {world} processes"):
            config.size_axes(world)


@given(st.sampled_from(PARTS), named, st.integers(1, 64))
def test_every_suggested_layout_fits(part, sizes, world):
    try:
        part(**sizes).size_axes(world)
    except UserError as error:
        offered = error.details[-1].removeprefix("Nearest: ").rstrip(".").split("; or ")
        assert offered
        for word in offered:
            path, _, value = word.partition("=")
            if path == "launch.processes":
                part(**sizes).size_axes(int(value))
            else:
                part(**{**sizes, path.removeprefix("parallel."): int(value)}).size_axes(world)


@given(named, st.integers(0, 16))
def test_default_rank_count_fits_the_axes(sizes, gpus):
    for part in PARTS:
        config = part(**sizes)
        world = config.count_ranks(gpus)
        if not gpus or all(axis in sizes for axis in part.TAKERS):
            assert prod(config.size_axes(world).values()) == world
        else:
            assert world == gpus


@pytest.mark.parametrize(
    ("config", "world", "sizes"),
    [
        (ThreeD(), 8, {"tp": 2, "pp": 2, "dp_shard": 2}),
        (ThreeD(), 16, {"tp": 2, "pp": 2, "dp_shard": 4}),
        (ThreeD(), 2, {"tp": 2}),
        (ThreeD(), 3, {"dp_shard": 3}),
        (ThreeD(dp_shard=1, dp_replicate=1), 8, {"pp": 4, "tp": 2}),
        (ThreeD(dp_shard=2), 16, {"tp": 2, "pp": 2, "dp_shard": 2, "dp_replicate": 2}),
        (ThreeD(tp=8, pp=16), 16384, {"tp": 8, "pp": 16, "dp_shard": 128}),
        (Fsdp(), 8, {"dp_shard": 8}),
        (Fsdp(dp_shard=4), 8, {"dp_shard": 4, "dp_replicate": 2}),
        (Hsdp(), 8, {"dp_shard": 4, "dp_replicate": 2}),
        (Hsdp(), 32, {"dp_shard": 8, "dp_replicate": 4}),
        (Hsdp(), 7, {"dp_shard": 7}),
        (Hsdp(dp_replicate=2), 32, {"dp_shard": 16, "dp_replicate": 2}),
        (Tp(), 4, {"tp": 4}),
        (Tp(tp=2), 8, {"tp": 2, "dp_shard": 4}),
        (Pp(cp=2), 8, {"pp": 4, "cp": 2}),
    ],
    ids=str,
)
def test_unset_axes_get_expected_sizes(config: AxesConfig, world, sizes):
    assert config.size_axes(world) == {axis: sizes.get(axis, 1) for axis in AXES}


@pytest.mark.parametrize(
    ("config", "gpus", "world"),
    [
        (ThreeD(), 0, 8),
        (ThreeD(tp=4), 0, 8),
        (ThreeD(tp=3), 0, 3),
        (ThreeD(tp=4, pp=4), 0, 16),
        (ThreeD(tp=1, pp=2, dp_shard=1, dp_replicate=1), 8, 2),
        (ThreeD(), 4, 4),
        (Fsdp(), 0, 2),
        (Hsdp(), 0, 4),
        (Tp(), 0, 2),
        (Tp(tp=4), 0, 4),
        (Pp(), 8, 8),
    ],
    ids=str,
)
def test_each_part_has_expected_default_rank_count(config: AxesConfig, gpus, world):
    assert config.count_ranks(gpus) == world


def test_impossible_layout_error_suggests_nearest_sizes():
    with pytest.raises(UserError) as caught:
        ThreeD(tp=3, pp=2).size_axes(8)
    assert str(caught.value) == (
        "pp 2 x tp 3 = 6 does not fit 8 processes.\n"
        "  8 is not a multiple of 6. "
        "The product of the given axis sizes must divide the number of processes.\n"
        "  Nearest: parallel.tp=4; or parallel.tp=2; or parallel.tp=1; or launch.processes=6; or launch.processes=12."
    )


@given(st.integers(1, 64))
def test_fully_specified_axes_are_kept(world):
    assert derive_axis_sizes(world, {axis: world if axis == "cp" else 1 for axis in AXES}, {}, ())["cp"] == world
