"""Experts obey the law of layouts: whatever axes a run is cut along, it is the run of one process."""

from __future__ import annotations

import pytest

from gangline.testing import StrategySuite
from gangline.testing.strategy import FLOAT64, Layout, Scenario

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
SMALL = ("moe=on", "batch.sequence_length=16", "run.deterministic=false")
EVERYTHING = (
    "moe.shared=1",
    "moe/router=sigmoid",
    "moe.router.sequence_loss=0.01",
    "moe.router.step_loss=0.01",
    "moe.router.z_loss=0.001",
    "moe.router.jitter=0.1",
)


class Law(StrategySuite):
    """The suite's machinery, with a model of experts in the place of the toy."""

    choice = "parallel=3d"


def holds(on: str, *settings: str, steps: int = 2, bound: float = FLOAT64) -> None:
    """Loss, gradients, norm, weights and evaluation against one process. on: "pp=2 tp=2 zero=3"."""
    options = {**dict.fromkeys(AXES, "1"), **dict(word.split("=") for word in on.split())}
    world = 1
    for axis in AXES:
        world *= int(options[axis])
    layout = Layout(world, tuple(f"parallel.{name}={value}" for name, value in options.items()))
    law = Law()
    scenario = Scenario((*SMALL, *settings), steps=steps)
    job = law.job(layout, scenario)
    problems = [*job.run.parallel.check(job.run), *job.run.edits["moe"].check(job.run)]
    assert not problems, "\n".join(map(str, problems))
    law.compare(layout, scenario, bound)
    got = law.trained(job)
    for of_rank in got:
        for one, want in zip(of_rank.steps, law.expected(job, got[0].coordinate[1])[1], strict=True):
            assert one.metrics.keys() == want.metrics.keys()
            for name, value in want.metrics.items():
                assert one.metrics[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(
    ("on", "ep", "out_of"),
    [
        ("dp_shard=2", 2, "dp_shard"),
        ("dp_shard=4 zero=3", 4, "dp_shard"),
        ("dp_shard=2 tp=2 zero=2", 2, "dp_shard"),
        ("dp_shard=2 tp=2 zero=3", 4, "dp_shard,tp"),
        ("dp_shard=2 tp=2 sequence_parallel=false", 2, "dp_shard"),
        ("dp_shard=2 cp=2 zero=1", 4, "dp_shard,cp"),
        ("pp=2 dp_shard=2", 2, "dp_shard"),
        ("pp=2 dp_shard=2 schedule=interleaved_1f1b", 2, "dp_shard"),
        ("pp=2 dp_shard=2 schedule=zb_h1 zero=3", 2, "dp_shard"),
    ],
)
def test_ranks_share_the_experts(on, ep, out_of):
    holds(on, f"moe.ep={ep}", f"moe.ep_out_of=[{out_of}]", "model.layers=4", *EVERYTHING)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("on", "ep", "out_of"),
    [
        ("dp_shard=8", 8, "dp_shard"),
        ("dp_shard=8 zero=3", 2, "dp_shard"),
        ("dp_replicate=2 dp_shard=4 zero=2", 4, "dp_shard"),
        ("dp_replicate=2 dp_shard=2 tp=2 zero=3", 4, "dp_replicate,dp_shard"),
        ("dp_shard=2 cp=2 tp=2 zero=3", 8, "dp_shard,cp,tp"),
        ("dp_shard=2 cp=2 tp=2 zero=2 context=ulysses", 2, "cp"),
        ("pp=2 dp_shard=2 tp=2 schedule=interleaved_1f1b zero=3", 4, "dp_shard,tp"),
        ("pp=2 dp_shard=4 schedule=zb_v", 4, "dp_shard"),
        ("pp=2 dp_shard=2 tp=2 schedule=dualpipe_v zero=3", 2, "dp_shard"),
        ("pp=4 dp_shard=2 schedule=1f1b", 2, "dp_shard"),
    ],
)
def test_more_ranks_share_the_experts(on, ep, out_of):
    holds(on, f"moe.ep={ep}", f"moe.ep_out_of=[{out_of}]", "model.layers=4", *EVERYTHING)
    holds(on, f"moe.ep={ep}", f"moe.ep_out_of=[{out_of}]", "model.layers=4", "run.recompute=full", *EVERYTHING)


def test_three_axes_and_experts_on_eight_processes():
    """Twenty steps carry roundings on, and a large step length makes them grow."""
    holds("pp=2 dp_shard=2 tp=2", "moe.ep=2", *EVERYTHING, steps=20, bound=1e-9)
