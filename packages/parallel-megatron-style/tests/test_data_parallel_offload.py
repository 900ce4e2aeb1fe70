"""`parallel.offload`: master weights and optimizer state in host memory, with bit-identical results."""

from __future__ import annotations

import pytest
import torch

from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.plugin.registry import build
from gangline_testkit import rank, strategy_ranks
from gangline_testkit.compare import close
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run
from gangline_testkit.strategy_ranks import StrategyJob

BUILD = "gangline_parallel_megatron_style.build:build"
LAYOUTS = [("parallel=3d", {"dp_shard": 2}), ("parallel=fsdp", {"dp_shard": 2}), ("parallel=tp", {"tp": 2})]


def job_of(layout, axes, offload):
    run = build_small_run(layout, f"parallel.offload={str(offload).lower()}")
    return StrategyJob(BUILD, run, *compose_model(run), Mesh.of(axes), torch.float32, "ragged", 3)


def storages(job):
    """Return (device types of master weights, gradients and optimizer state; addresses shared with compute weights)."""
    runtime = strategy_ranks.start(job)
    optimizer = build(job.run.optimizer, job.run, runtime)
    runtime.step(job.share(0, *runtime.data_coordinate))
    assert rank.world == 2
    pieces = [piece.tensor for named in runtime.parameters() for piece in named.pieces]
    stepped = [*pieces, *(shard.local for shard in optimizer.shards())]
    computed = [buffer.full for buffer in runtime.storage.param_buffers]
    return (
        {x.device.type for x in [*stepped, *(piece.grad for piece in pieces)]},
        {x.untyped_storage().data_ptr() for x in stepped} & {x.untyped_storage().data_ptr() for x in computed},
    )


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS, ids=[name for name, _ in LAYOUTS])
def test_offload_is_bit_identical(layout, axes):
    plain, moved = (get_pool(2).run(strategy_ranks.train, job_of(layout, axes, offload)) for offload in (False, True))
    for one, two in zip(plain, moved, strict=True):
        assert [(s.loss_sum, s.norm) for s in one.steps] == [(s.loss_sum, s.norm) for s in two.steps]
        for (name, _, before), (_, _, after) in zip(one.last, two.last, strict=True):
            close(name, after, before, 0)


@pytest.mark.parametrize(("layout", "axes"), LAYOUTS, ids=[name for name, _ in LAYOUTS])
def test_offloaded_state_shares_no_memory_with_compute_weights(layout, axes):
    for devices, shared in get_pool(2).run(storages, job_of(layout, axes, True)):
        assert devices == {"cpu"}
        assert not shared


def places_of_gradients(job):
    """Return the addresses of this rank's gradients in host memory after each of two steps."""
    runtime = strategy_ranks.start(job)
    found = []
    for step in range(2):
        runtime.step(job.share(step, *runtime.data_coordinate))
        found.append([p.tensor.grad.data_ptr() for named in runtime.parameters() for p in named.pieces])
    return found


def test_gradients_reuse_host_memory_at_each_step():
    """Compare addresses: newly allocated memory is not pinned, so the host would wait for each copy."""
    layout, axes = LAYOUTS[0]
    for one, two in get_pool(2).run(places_of_gradients, job_of(layout, axes, True)):
        assert one == two
