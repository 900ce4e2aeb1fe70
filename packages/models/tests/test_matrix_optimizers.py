"""`optimizer=muon` and `soap` on models with convolution filters: the filters are optimized with AdamW."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gangline.config.compose import compose
from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline.train.build import build
from gangline.train.rank import train
from gangline_testkit import rank

MODEL = ("model=qwen3_next", "model.dim=32", "model.layers=2", "model.heads=2", "model.kv_heads=1", "model.ffn_dim=64")


@pytest.mark.parametrize("optimizer", ["optimizer=muon", "optimizer=soap optimizer.max_precond_dim=64"])
def test_convolution_filters_are_optimized_with_adamw(tmp_path: Path, optimizer: str) -> None:
    """(channels, 1, taps): AdamW steps them; each channel as a matrix would be as many arrays and matmuls."""
    words = [*optimizer.split(), "model.vocab_size=256", "precision=fp32", f"run.dir={tmp_path}/run"]
    size = ["batch.global_size=2", "batch.sequence_length=16", "run.device=cpu", "validate.every=null"]
    (run,) = compose(["recipe=quick", *MODEL, *words, *size, "run.steps=2", "checkpoint=off"])
    RunDirectory.create(run).unlock()
    mesh = Mesh.of(run.parallel.size_axes(1))
    comms = rank.make_comms(mesh)
    started = build(run, RunDirectory.open(run.job.dir), mesh, comms, torch.device("cpu"))
    shapes = {name: started.runtime.registry[f"model/{name}"].shape for name in started.runtime.names()}
    filters = [name for name, shape in shapes.items() if len(shape) == 3 and shape[1] == 1]
    kept = set(started.optimizer.registry)
    assert filters
    assert all(f"optimizer/exp_avg_sq/{name}" in kept for name in filters)
    assert not any(f"{name}.0" in array for name in filters for array in kept)
    said = run.parallel.explain(run, mesh)
    assert said is not None
    held = sum(shard.local.numel() * shard.local.itemsize for shard in started.optimizer.shards())
    assert held == said.ranks[0].bytes["optimizer state"]
    assert train(started) == 0
