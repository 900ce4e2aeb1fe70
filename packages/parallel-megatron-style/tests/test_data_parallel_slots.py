"""Buckets of a gradient reduction: complete rows as matrices, every array covered once."""

from __future__ import annotations

from hypothesis import given, strategies as st

from gangline_parallel_megatron_style.data_parallel.reduction import list_slots, make_bucket_layouts
from gangline_parallel_megatron_style.sharding.packing import ArrayRows, pack

SHAPES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=5)


@given(SHAPES, st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_slots_cover_each_array_once(shapes, n, R, cut):
    arrays = [ArrayRows(str(number), *shape) for number, shape in enumerate(shapes)]
    for packing in pack(arrays, n if cut else 1):
        buckets = make_bucket_layouts(packing, n, R, cut)
        assert len(buckets) == (n if R > 1 else 1)
        counted = {array.name: 0 for array in packing.arrays}
        for bucket in buckets:
            ends = [0]
            for slot in bucket.slots:
                assert ends[-1] <= slot.offset
                ends.append(slot.offset + slot.size)
                counted[slot.name] += slot.size
            assert ends[-1] <= bucket.size
        assert counted == {array.name: array.size for array in packing.arrays}


def test_border_inside_a_row_makes_partial_slots():
    (packing,) = pack([ArrayRows("w", 4, 10)], 1)
    found = [(slot.name, slot.offset, slot.shape) for slot in list_slots(packing, 5, 33)]
    assert found == [("w", 0, (5,)), ("w", 5, (2, 10)), ("w", 25, (3,))]
