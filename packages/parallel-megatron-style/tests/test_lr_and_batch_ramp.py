"""Learning rates and weight decay by parameter name, and `batch.ramp`: the run of one process on any layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from gangline_testkit.sessions import read_lines, train_on_ranks, train_session

WORDS = (
    "run.steps=6",
    "optimizer.lr_multipliers={embed: 0.5, blocks.*.attention: 0.25, blocks.1: 3.0, blocks.0.feed_forward.w_up: 2.0}",
    "optimizer.weight_decay_overrides={embed: 0.0, blocks.*.attention_norm: 0.3}",
    "batch.ramp={4: 10, 8: 24}",
    "batch.global_size=16",
)
LAYOUTS = {
    "zero 3": (2, "parallel=fsdp", "parallel.zero=3", "batch.micro_size=2"),
    "zero 1, replicated": (4, "parallel=hsdp", "parallel.zero=1", "parallel.dp_shard=2", "parallel.dp_replicate=2"),
    "tp and pp": (4, "parallel=3d", "parallel.tp=2", "parallel.pp=2"),
}


# By default, each layout runs once, and each optimizer at least once.
CASES = [
    ("zero 3", "adamw"),
    ("zero 1, replicated", "muon"),
    ("tp and pp", "muon"),
    pytest.param("tp and pp", "adamw", marks=pytest.mark.nightly),
    pytest.param("zero 3", "muon", marks=pytest.mark.nightly),
    pytest.param("zero 1, replicated", "adamw", marks=pytest.mark.nightly),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[dict[str, Any]]]:
    """Return a function that trains in one process, once for each set of overrides, and returns the records."""

    @cache
    def records(*words: str) -> list[dict[str, Any]]:
        run_dir = tmp_path_factory.mktemp("alone") / "run"
        assert train_session(run_dir, *words) == 0
        return read_lines(run_dir, "metrics.jsonl")

    return records


@pytest.mark.parametrize(("layout", "optimizer"), CASES)
def test_multipliers_and_batch_ramp_match_one_process(
    tmp_path: Path, alone: Callable, layout: str, optimizer: str
) -> None:
    chosen = (f"optimizer={optimizer}", *WORDS)
    world, *words = LAYOUTS[layout]
    assert train_on_ranks(world, tmp_path / "cut", *chosen, *words) == 0
    one, cut = alone(*chosen), read_lines(tmp_path / "cut", "metrics.jsonl")
    assert [record["first_sample"] for record in cut] == [0, 4, 8, 12, 20, 28]
    for here, there in zip(one, cut, strict=True):
        assert there["first_sample"] == here["first_sample"]
        assert there["loss"] == pytest.approx(here["loss"], rel=1e-11), here["step"]
        assert there["grad_norm"] == pytest.approx(here["grad_norm"], rel=1e-10), here["step"]
    assert alone(*chosen, "optimizer.lr_multipliers={}")[-1]["loss"] != one[-1]["loss"]
