"""Invalid gradient reductions of a part are refused before they change a gradient, with the name of the part."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gangline.comm.solo import Solo
from gangline.gradients import Bucket, BucketLayout, CheckedReduction, GradientReduction, GradientSlot

LAYOUT = BucketLayout(4, (GradientSlot("w", 0, (2, 2)),), 1)
BUCKET = Bucket(LAYOUT, torch.ones(4), {}, 0)


@dataclass
class Done:
    total: object

    def wait(self):
        return self.total


class Sum(GradientReduction):
    def __init__(self, returned, shapes=None):
        self.returned, self.shapes = returned, shapes or {}

    def get_array_shapes(self, layout):
        return self.shapes

    def reduce(self, bucket, comm):
        return self.returned


def check(returned, shapes=None):
    return CheckedReduction("gangline-mine/mine", Sum(returned, shapes))


def test_valid_reduction_passes():
    total = torch.full((4,), 2.0)
    reduction = check(Done(total), {"error": [4], "blocks.0.w": (2, 1)})
    assert reduction.reduce(BUCKET, Solo("dp", 0)).wait() is total
    assert reduction.reduce_scatter(BUCKET, Solo("dp", 0)).wait() is not None
    assert reduction.get_array_shapes(LAYOUT) == {"error": (4,), "blocks.0.w": (2, 1)}


@pytest.mark.parametrize(
    "total", [torch.ones(()), torch.ones(8), torch.ones(4, dtype=torch.int64), torch.ones(2, 2), None]
)
def test_sum_of_wrong_shape_or_dtype_is_refused(total):
    with pytest.raises(TypeError, match="gangline-mine/mine returned a sum"):
        check(Done(total)).reduce(BUCKET, Solo("dp", 0)).wait()


@pytest.mark.parametrize("returned", [None, torch.ones(4)])
def test_reduction_without_wait_handle_is_refused(returned):
    with pytest.raises(TypeError, match=r"gangline-mine/mine returned .* instead of a `Pending`"):
        check(returned).reduce(BUCKET, Solo("dp", 0))


@pytest.mark.parametrize(
    "shapes", [{"../x": (1,)}, {"": (1,)}, {"a b": (1,)}, {"a": (-1,)}, {"a": (1.5,)}, {"a": (True,)}]
)
def test_invalid_array_name_or_shape_is_refused(shapes):
    with pytest.raises(ValueError, match="gangline-mine/mine stores an array"):
        check(None, shapes).get_array_shapes(LAYOUT)
