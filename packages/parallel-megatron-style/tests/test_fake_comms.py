"""Fake collectives of a simulated mesh: bytes counted per axis, and values that equal ranks would give."""

from __future__ import annotations

import pytest
import torch

from gangline.mesh import Mesh
from gangline.plan import Fold
from gangline_parallel_megatron_style.explain.fake_comms import FakeComms


def test_fold_not_dividing_its_axes_is_refused():
    with pytest.raises(ValueError, match="part=3 must divide the 4 ranks along its axes dp_shard x tp"):
        FakeComms(Mesh.of({"dp_shard": 2, "tp": 2})).fold(Fold("part", 3, ("dp_shard", "tp")))


def test_fake_mesh_counts_traffic_per_axis():
    mesh = Mesh.of({"pp": 16, "dp_shard": 128, "tp": 8})
    comms = FakeComms(mesh, rank=12_345, device="meta")
    tp, data, pipeline = (comms.get_comm(axis) for axis in ("tp", "dp_shard", "pp"))
    assert (tp.size, data.size, pipeline.size, comms.world.size) == (8, 128, 16, 16_384)
    x = torch.empty(8192, 1024, dtype=torch.bfloat16, device="meta")
    for _ in range(3):
        assert tp.all_gather(x).shape == (8 * 8192, 1024)
    assert data.reduce_scatter(x).shape == (64, 1024)
    assert tp.start_all_to_all(x, [1024] * 8, [2000] * 8).wait().shape == (16_000, 1024)
    pipeline.exchange([(x, 1)], [(torch.empty_like(x), 0)])
    size = 8192 * 1024 * 2
    assert comms.traffic.calls == {
        ("tp", "all_gather"): 3,
        ("dp_shard", "reduce_scatter"): 1,
        ("tp", "all_to_all"): 1,
        ("pp", "exchange"): 1,
    }
    assert comms.traffic.bytes["tp", "all_gather"] == 3 * size
    assert comms.traffic.sum_axis("tp") == 4 * size
    assert comms.traffic.sum_axis("dp_shard") == comms.traffic.sum_axis("pp") == size


def test_fake_collectives_return_values_of_equal_ranks():
    comm = FakeComms(Mesh.of({"tp": 4}), rank=1).get_comm("tp")
    x = torch.arange(8.0)
    assert comm.reduce_scatter(x).tolist() == [8.0, 12.0]
    assert comm.all_gather(x[:2]).tolist() == [0.0, 1.0] * 4
    assert comm.all_reduce(x.clone(), "max").equal(x)
    assert comm.all_reduce(x.clone()).equal(4 * x)
    assert comm.broadcast(x, 3) is x
