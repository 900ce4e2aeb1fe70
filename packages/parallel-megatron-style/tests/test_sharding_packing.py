"""Flat buffers: one view per array, complete rows, ranges of equal length."""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from unittest.mock import patch

import pytest
from hypothesis import given, settings, strategies as st

from gangline_parallel_megatron_style.sharding import packing as module
from gangline_parallel_megatron_style.sharding.packing import ArrayRows, pack

counts, widths = st.integers(1, 40), st.sampled_from([1, 3, 4, 7, 8, 12, 16, 64])
units = st.lists(st.tuples(counts, widths), min_size=1, max_size=8).map(
    lambda found: [ArrayRows(f"array{index}", count, width) for index, (count, width) in enumerate(found)]
)


@settings(deadline=None)
@given(units, st.integers(1, 9))
def test_arrays_do_not_overlap_and_rows_stay_complete(arrays, parts):
    packings = pack(arrays, parts)
    assert sorted(array.name for packing in packings for array in packing.arrays) == sorted(a.name for a in arrays)
    for packing in packings:
        end = 0
        for index, (array, start) in enumerate(zip(packing.arrays, packing.starts, strict=True)):
            assert start >= end
            end = start + array.size
            bounds = packing.compute_row_bounds(index)
            assert (bounds[0], bounds[-1]) == (0, array.count)
            for part, (first, last) in enumerate(pairwise(bounds)):
                if first < last:  # the range holds rows of this array
                    assert start + first * array.width >= part * packing.length
                    assert start + last * array.width <= (part + 1) * packing.length
        assert end <= packing.size


@settings(deadline=None)
@given(units, st.integers(2, 9))
def test_array_piece_starts_at_its_range_border(arrays, parts):
    """Check the layout that lets a rank find the pieces of an array from the array's start."""
    for packing in pack(arrays, parts):
        for index, array in enumerate(packing.arrays):
            bounds = packing.compute_row_bounds(index)
            for part in range(1, parts):
                if 0 < bounds[part] < array.count:
                    assert packing.starts[index] + bounds[part] * array.width == part * packing.length


def test_padding_of_a_block_is_small():
    block = [ArrayRows(f"m{i}", 512, 192) for i in range(7)] + [ArrayRows("down", 192, 512), ArrayRows("norm", 1, 192)]
    for parts in (2, 4, 8, 16):
        (packing,) = pack(block, parts)
        assert packing.size <= 1.06 * sum(array.size for array in block)


LLAMA_8B = [
    ArrayRows("attention_norm", 1, 4096),
    *(ArrayRows(name, count, 4096) for name, count in (("wq", 4096), ("wk", 1024), ("wv", 1024), ("wo", 4096))),
    ArrayRows("feed_forward_norm", 1, 4096),
    *(ArrayRows(name, count, width) for name, count, width in (("gate", 14336, 4096), ("up", 14336, 4096))),
    ArrayRows("down", 4096, 14336),
]
GPT = [
    ArrayRows("attention_norm", 1, 768),
    *(ArrayRows(name, 768, 768) for name in ("wq", "wk", "wv", "wo")),
    ArrayRows("feed_forward_norm", 1, 768),
    *(
        ArrayRows(name, count, width)
        for name, count, width in (("gate", 2048, 768), ("up", 2048, 768), ("down", 768, 2048))
    ),
]


@pytest.mark.parametrize(
    ("block", "parts", "rows"),
    [(LLAMA_8B, 2, 2240), (LLAMA_8B, 8, 672), (LLAMA_8B, 64, 56), (GPT, 2, 288), (GPT, 8, 16), (GPT, 64, 8)],
)
def test_rows_are_split_at_multiples_of_large_divisor(block, parts, rows):
    """Check the smallest divisor among the arrays that are split."""
    (packing,) = pack(block, parts)
    found = [
        gcd(*(b for b in packing.compute_row_bounds(i) if b < a.count))
        for i, a in enumerate(packing.arrays)
        if a.count > 1
    ]
    assert min(divisor for divisor in found if divisor) >= rows
    assert packing.size <= (1.015 if parts < 64 else 1.06) * sum(array.size for array in block)


@settings(deadline=None)
@given(units, st.integers(2, 9))
def test_packing_grain_adds_at_most_1_percent_padding(arrays, parts):
    coarse = sum(packing.size for packing in pack(arrays, parts))
    with patch.object(module, "GRAIN", 0.0):
        fine = sum(packing.size for packing in pack(arrays, parts))
    assert coarse <= fine + 0.01 * sum(array.size for array in arrays)


def test_incompatible_widths_get_separate_buffers():
    arrays = [ArrayRows("a", 50, 101), ArrayRows("b", 50, 103), ArrayRows("c", 1, 101)]
    packings = pack(arrays, 8)
    assert [[array.name for array in packing.arrays] for packing in packings] == [["a", "c"], ["b"]]


def test_unsharded_packing_needs_hardly_any_padding():
    (packing,) = pack([ArrayRows("a", 3, 5), ArrayRows("b", 1, 7), ArrayRows("c", 2, 3)], 1)
    assert packing.starts == (0, 16, 24)
    assert packing.size == 30
