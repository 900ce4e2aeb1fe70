"""`callback=ema` under tensor, pipeline, context and data parallelism: the averages of one process."""

from __future__ import annotations

import pytest
import torch

from gangline_testkit.sessions import open_session, read_lines, train_on_ranks, train_session

EMA = ("callback=ema", "callback.ema.decays=[0.5,0.9]", "validate.every=2", "batch.micro_size=1")
OPEN = ("parallel.tp=1", "parallel.pp=1", "parallel.cp=1", "parallel.dp_replicate=1", "parallel.dp_shard=1")
LAYOUTS = (("parallel.tp=2", "parallel.pp=2"), ("parallel.cp=2", "parallel.dp_shard=2"))


def averages(run_dir) -> dict[str, torch.Tensor]:
    """Return the averages of a run of any layout, read by one process."""
    s = open_session(run_dir, *EMA)
    return {shard.name: shard.local.clone() for shard in s.shards() if shard.name.startswith("callback/")}


def test_ema_across_layouts_matches_one_process(tmp_path):
    train_session(tmp_path / "one", *EMA, "run.steps=4")
    for steps, layout in zip((2, 4), LAYOUTS, strict=True):
        train_on_ranks(4, tmp_path / "cut", *EMA, "parallel=3d", *OPEN, *layout, f"run.steps={steps}")
    found, want = averages(tmp_path / "cut"), averages(tmp_path / "one")
    assert found.keys() == want.keys()
    assert len(want) == 2 * len([name for name in want if name.startswith("callback/ema/0.9/")])
    for name, array in want.items():
        torch.testing.assert_close(found[name], array, rtol=0, atol=1e-12 * float(array.abs().max()), msg=name)
    losses = [
        [record["validation_losses"] for record in read_lines(tmp_path / run, "metrics.jsonl")][1::2]
        for run in ("cut", "one")
    ]
    for cut, one in zip(*losses, strict=True):
        assert cut == pytest.approx(one, rel=1e-12)
        assert set(one) == {"ema/0.5", "ema/0.9"}
