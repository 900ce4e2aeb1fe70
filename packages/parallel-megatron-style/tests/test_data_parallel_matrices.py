"""Matrices on a fold over tensor-parallel ranks: each is mapped once, not as an array sharded over tp."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from gangline.mesh import Mesh
from gangline.model.compose import compose_model
from gangline.plan import Fold
from gangline_testkit import strategy_ranks
from gangline_testkit.compare import check_mapped_once
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run
from gangline_testkit.strategy_ranks import StrategyJob
from gangline_testkit.toys.plugin import Lanes, edit_lanes


@pytest.mark.parametrize(
    ("mesh", "fold", "zero"),
    [
        ({"tp": 2}, Fold("lane", 2, ("tp",)), 0),
        ({"dp_shard": 2, "tp": 2}, Fold("lane", 2, ("tp",)), 1),
        ({"dp_shard": 2, "tp": 2}, Fold("lane", 4, ("dp_shard", "tp")), 3),
    ],
    ids=["tp", "tp beside dp", "both"],
)
def test_each_matrix_on_a_fold_is_mapped_once(mesh, fold, zero):
    run = build_small_run("parallel=3d", f"parallel.zero={zero}")
    tree, plan, _ = edit_lanes(*compose_model(run), Lanes(fold=fold.size))
    plan = replace(plan, folds=(fold,))
    build = "gangline_parallel_megatron_style.build:build"
    job = StrategyJob(build, run, tree, plan, Mesh.of(mesh), torch.float64, "ragged", 1)
    want = get_pool(1).run(strategy_ranks.expect_mapped, replace(job, build="", mesh=Mesh.of({})))[0]
    check_mapped_once(get_pool(Mesh.of(mesh).world).run(strategy_ranks.map_matrices, job), want)
