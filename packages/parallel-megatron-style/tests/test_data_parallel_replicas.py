"""Sharded gradients of replicas: one reduction per step for any number of microbatches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gangline.mesh import Mesh
from gangline.model import forward_context
from gangline.model.compose import compose_model
from gangline_basics.parallel.microbatch import make_frame
from gangline_testkit import strategy_ranks
from gangline_testkit.compare import Held, assemble, compare_all
from gangline_testkit.pool import get_pool
from gangline_testkit.reference import Reference
from gangline_testkit.runs import build_small_run
from gangline_testkit.strategy_ranks import StrategyJob

MESH = Mesh.of({"dp_replicate": 2, "dp_shard": 2})
BUILD = "gangline_parallel_megatron_style.build:build"


def job_of(zero: int) -> StrategyJob:
    settings = [f"parallel.zero={zero}", "batch.global_size=24", "batch.micro_size=2", "run.deterministic=false"]
    run = build_small_run("parallel=hsdp", *settings)
    return StrategyJob(BUILD, run, *compose_model(run), MESH, torch.float32, "ragged")


def on_a_rank(job: StrategyJob) -> tuple[list[Held], list[dict[str, Tensor]]]:
    """Return (this rank's shards of the gradients, the full gradients of each of its microbatches)."""
    runtime = strategy_ranks.start(job)
    batches = job.share(0, *runtime.data_coordinate)
    tokens = runtime.step(batches).tokens
    reference = Reference(job.tree, job.plan, seed=job.run.job.seed, dtype=job.dtype)
    return strategy_ranks.hold_gradients(runtime), [gradients(reference, batch, tokens) for batch in batches]


def gradients(reference: Reference, batch, tokens: int) -> dict[str, Tensor]:
    frame = make_frame(batch, 0, reference.seed, None)
    for weight in reference.weights.values():
        weight.grad = None
    with forward_context.frame(frame):
        loss = reference.compute_loss(batch)
        loss.backward(torch.full_like(loss, 1.0 / tokens))
    return {name: weight.grad.clone() for name, weight in reference.weights.items()}


@pytest.mark.parametrize("zero", [2, 3])
def test_replicas_add_gradients_after_all_microbatches(zero):
    """Compare with (a0 + b0) + (a1 + b1) + ... of the first replica's ranks, plus the sum of the second replica."""
    pieces, every = zip(*get_pool(4).run(on_a_rank, job_of(zero)), strict=True)
    assert {len(batches) for batches in every} == {3}
    wanted = {}
    for name in every[0][0]:
        replicas = []
        for first, second in ((0, 1), (2, 3)):
            parts = [one[name] + two[name] for one, two in zip(every[first], every[second], strict=True)]
            replicas.append((parts[0] + parts[1]) + parts[2])
        wanted[name] = replicas[0] + replicas[1]
    held = assemble(list(pieces), {name: tuple(x.shape) for name, x in wanted.items()})
    compare_all("gradient", held, wanted, 0)
