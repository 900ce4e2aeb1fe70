"""One run on many layouts by the real command: the same loss curve, also after a resume on another layout."""

from __future__ import annotations

import pytest
from curves import STEPS, same


@pytest.fixture(scope="module")
def three_d(curves) -> str:
    """Train a run on eight processes (tp 2, pp 2, dp_shard 2) and return its directory."""
    curves.train("run.dir=three-d", "parallel=3d")
    return "three-d"


def test_three_dimensional_layout_matches_one_process(curves, three_d):
    same(curves.read_records(three_d), curves.alone[:STEPS])


def test_run_resumes_across_layouts_on_same_curve(curves, three_d):
    """Resume on each layout from the checkpoint that the layout before saved, with weights and optimizer state."""
    steps = STEPS
    layouts = (["single"], ["pp", "launch.processes=2"], ["fsdp", "launch.processes=2"], ["3d"])
    for name, *more in layouts:
        curves.train(f"resume={three_d}", f"parallel={name}", *more, f"run.steps={steps + 2}")
        same(curves.read_records(three_d)[steps:], curves.alone[steps : steps + 2])
        steps += 2
