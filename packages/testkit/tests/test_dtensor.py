"""Conversion between DTensor and Shard, compared with the placement that DTensor reports per rank."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard as OnDim, distribute_tensor

from gangline_testkit import rank
from gangline_testkit.dtensor import to_dtensor, to_shard
from gangline_testkit.pool import get_pool

PLACEMENTS = [
    (Replicate(), Replicate()),
    (OnDim(0), Replicate()),
    (Replicate(), OnDim(1)),
    (OnDim(0), OnDim(1)),
    (OnDim(0), OnDim(0)),
    (OnDim(-1), Replicate()),
]


def there_and_back(shape, placements):
    device_mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    tensor = distribute_tensor(whole.clone(), device_mesh, placements)
    shard = to_shard("a", tensor)
    assert shard.global_shape == shape
    assert shard.local.equal(whole[shard.box.slices])
    shard.local.add_(1)
    assert tensor.full_tensor().equal(whole + 1)
    again = to_dtensor(shard, device_mesh, placements)
    assert again.full_tensor().equal(whole + 1)
    assert again.placements == tensor.placements
    return shard.offset, tuple(shard.local.shape), shard.primary


@pytest.mark.parametrize("placements", PLACEMENTS)
@pytest.mark.parametrize("shape", [(4, 6), (5, 3), (3, 1)])  # even, uneven, and with empty shards
def test_dtensor_shard_round_trip_keeps_values(shape, placements):
    found = get_pool(4).run(there_and_back, shape, placements)
    written = torch.zeros(shape)
    for offset, local, primary in found:
        if primary:
            written[tuple(slice(start, start + length) for start, length in zip(offset, local, strict=True))] += 1
    assert written.equal(torch.ones(shape))


def refused():
    device_mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.zeros(4, 4)
    tensor = distribute_tensor(whole, device_mesh, (OnDim(0), Replicate()))
    partial = type(tensor).from_local(whole, device_mesh, (Partial(), Replicate()), run_check=False)
    with pytest.raises(ValueError, match=r"a: .* is not a box of the array"):
        to_shard("a", partial)
    shard = to_shard("a", tensor)
    if rank.index in (1, 2):  # on the other ranks, both placements give the same rows
        with pytest.raises(ValueError, match=r"the placements .* do not give"):
            to_dtensor(shard, device_mesh, (Replicate(), OnDim(0)))


def test_non_box_placement_is_refused():
    get_pool(4).run(refused)
