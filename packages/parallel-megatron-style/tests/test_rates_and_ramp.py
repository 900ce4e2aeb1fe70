"""Rates and weight decay by name, and a batch that grows: the run of one process, however it is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.testing.sessions import lines, trained, trained_on

WORDS = (
    "run.steps=6",
    "optimizer.rates={embed: 0.5, blocks.*.attention: 0.25, blocks.1: 3.0, blocks.0.feed_forward.w_up: 2.0}",
    "optimizer.decay={embed: 0.0, blocks.*.attention_norm: 0.3}",
    "batch.ramp={4: 10, 8: 24}",
    "batch.global_size=16",
)
LAYOUTS = {
    "zero 3": (2, "parallel=fsdp", "parallel.zero=3", "batch.micro_size=2"),
    "zero 1, replicated": (4, "parallel=hsdp", "parallel.zero=1", "parallel.dp_shard=2", "parallel.dp_replicate=2"),
    "tp and pp": (4, "parallel=3d", "parallel.tp=2", "parallel.pp=2"),
}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_run_is_that_of_one_process(tmp_path: Path, layout: str, optimizer: str) -> None:
    chosen = (f"optimizer={optimizer}", *WORDS)
    world, *words = LAYOUTS[layout]
    assert trained(tmp_path / "one", *chosen) == 0
    assert trained_on(world, tmp_path / "cut", *chosen, *words) == 0
    one, cut = (lines(tmp_path / name, "metrics.jsonl") for name in ("one", "cut"))
    assert [record["first_sample"] for record in cut] == [0, 4, 8, 12, 20, 28]
    for here, there in zip(one, cut, strict=True):
        assert there["first_sample"] == here["first_sample"]
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-11), here["step"]
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-10), here["step"]
    assert trained(tmp_path / "plain", *chosen, "optimizer.rates={}") == 0
    assert lines(tmp_path / "plain", "metrics.jsonl")[-1]["loss"] != one[-1]["loss"]
