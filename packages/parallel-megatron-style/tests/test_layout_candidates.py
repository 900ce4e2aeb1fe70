"""Candidate layouts of a run, and lower bounds of memory and idle time that no layout beats."""

from __future__ import annotations

from math import prod

import pytest

from gangline.config.compose import compose_one
from gangline.mesh import Mesh
from gangline.model.compose import compose_model


def axes(config) -> tuple[int, ...]:
    return config.pp, config.dp_replicate, config.dp_shard, config.cp, config.tp


def test_candidates_cover_every_size_of_unset_axes():
    run = compose_one(["parallel=3d", "parallel.tp=2", "launch.processes=16", "batch.global_size=8", "model.layers=8"])
    found = list(run.parallel.iterate_layouts(run, 16))
    assert {axes(one) for one in found if one.cp == 1} == {
        (1, 1, 8, 1, 2),
        (2, 1, 4, 1, 2),
        (4, 1, 2, 1, 2),
        (8, 1, 1, 1, 2),
    }
    assert {one.cp for one in found} == {1, 2}  # each cp rank has at least 64 of the 128 tokens
    assert all(prod(axes(one)) == 16 for one in found)


def test_layouts_respect_node_size_and_batch_size():
    run = compose_one(
        ["parallel=3d", "parallel.topology.gpus_per_node=4", "launch.processes=16", "batch.global_size=4"]
    )
    found = {axes(one) for one in run.parallel.iterate_layouts(run, 16)}
    assert max(tp for *_, tp in found) == 4
    assert all(4 % shard == 0 for _, _, shard, _, _ in found)


@pytest.mark.parametrize(
    "words",
    [
        "parallel=3d parallel.zero=1",
        "parallel=3d parallel.zero=3 precision=bf16",
        "parallel=3d parallel.schedule=zb_h1 precision=bf16",
        "parallel=3d parallel.schedule=interleaved_1f1b",
    ],
)
def test_memory_and_idle_bounds_hold_for_every_layout(words):
    sizes = "model.layers=8 model.heads=8 model.kv_heads=8 batch.micro_size=1 model.tied=false"
    run = compose_one(f"{words} launch.processes=8 {sizes}".split())
    model = compose_model(run)
    seen = 0
    for config in run.parallel.iterate_layouts(run, 8):
        mesh = Mesh.of(config.size_axes(8))
        run.parallel = config
        bounds, found = config.compute_bounds(run, mesh, model), config.explain(run, mesh)
        assert bounds.bytes <= max(rank.memory for rank in found.ranks)
        assert 0 <= bounds.idle < 1
        assert (bounds.idle > 0) <= (mesh.size("pp") > 1)
        assert bounds.microbatches == found.microbatches
        seen += 1
    assert seen > 4
