"""Layout invariance of experts (`moe=on`): results of one process for any combination of axes."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gangline.model import forward_context
from gangline_moe.dispatch import dispatcher
from gangline_testkit import StrategySuite
from gangline_testkit.scenarios import FLOAT64, RunLayout, Scenario
from gangline_testkit.strategy_ranks import StrategyJob, start

SMALL = ("moe=on", "batch.sequence_length=16", "run.deterministic=false")
FEW = ("batch.global_size=4", "batch.micro_size=1", "model.layers=2")
MANY = ("batch.global_size=8", "batch.micro_size=1", "model.layers=4")  # enough of both for pipeline schedules
MORE = ("batch.global_size=16", "batch.micro_size=1", "model.layers=4")
EVERYTHING = (
    "moe.shared=1",
    "moe/router=sigmoid",
    "moe.router.seq_aux_loss=0.01",
    "moe.router.global_aux_loss=0.01",
    "moe.router.z_loss=0.001",
    "moe.router.jitter=0.1",
)


class Layouts(StrategySuite):
    """Methods of the strategy suite, with a model of experts instead of the toy."""

    choice = "parallel=3d"


def holds(on: str, *settings: str, steps: int = 2, bound: float = FLOAT64) -> None:
    """Compare losses, gradients, weights and metrics with one process. on: for example "pp=2 tp=2 zero=3"."""
    suite, layout = Layouts(), RunLayout.from_words(on)
    scenario = Scenario((*SMALL, *settings), steps=steps)
    job = suite.make_job(layout, scenario)
    problems = [*job.run.parallel.check(job.run), *job.run.edits["moe"].check(job.run)]
    assert not problems, "\n".join(map(str, problems))
    suite.compare(layout, scenario, bound)
    got = suite.train_job(job)
    for of_rank in got:
        for one, want in zip(of_rank.steps, suite.train_reference(job, got[0].coordinate[1])[1], strict=True):
            assert one.metrics.keys() == want.metrics.keys()
            for name, value in want.metrics.items():
                assert one.metrics[name] == pytest.approx(value, rel=1e-10, abs=1e-12), name


@pytest.mark.parametrize(
    ("on", "ep", "out_of"),
    [
        pytest.param("dp_shard=2", 2, "dp_shard", marks=pytest.mark.nightly),
        ("dp_shard=4 zero=3", 4, "dp_shard"),
        ("dp_shard=2 tp=2 zero=2", 2, "dp_shard"),
        ("dp_shard=2 tp=2 zero=3", 4, "dp_shard,tp"),
        ("dp_shard=2 tp=2 sequence_parallel=false", 2, "dp_shard"),
        ("dp_shard=2 cp=2 zero=1", 4, "dp_shard,cp"),
        ("pp=2 dp_shard=2", 2, "dp_shard"),
        pytest.param("pp=2 dp_shard=2 schedule=interleaved_1f1b", 2, "dp_shard", marks=pytest.mark.nightly),
        ("pp=2 dp_shard=2 schedule=zb_h1 zero=3", 2, "dp_shard"),
        ("pp=2 dp_shard=2 schedule=dualpipe_v zero=3", 2, "dp_shard"),
    ],
)
def test_expert_parallelism_matches_one_process(on, ep, out_of):
    holds(on, f"moe.ep={ep}", f"moe.ep_axes=[{out_of}]", *(MANY if "pp" in on else FEW), *EVERYTHING)


def waits(job: StrategyJob) -> list[tuple[str, int]]:
    """Return ("waits" or "goes on", microbatch) for each exchange of a step on this rank, in order of time."""
    runtime, said = start(job), []

    def noted() -> None:
        microbatch = forward_context._frame.microbatch
        said.append(("waits", microbatch))
        forward_context.overlap_point()
        said.append(("goes on", microbatch))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatcher, "overlap_point", noted)
        runtime.step(job.share(0, *runtime.data_coordinate))
    return said


@pytest.mark.parametrize(("overlap", "side_by_side"), [("null", True), ("false", False)])
def test_expert_exchange_overlaps_another_microbatch(overlap, side_by_side):
    options = ("pp=2", "dp_shard=2", "tp=1", "schedule=dualpipe_v", f"overlap={overlap}")
    layout = RunLayout(4, tuple(f"parallel.{option}" for option in options))
    suite = Layouts()
    job = suite.make_job(layout, Scenario((*SMALL, "moe.ep=2", *MANY, *EVERYTHING)))
    for said in suite.run_on_ranks(waits, job):
        between = [(first, second) for first, second in pairwise(said) if first[0] == "waits"]
        assert any(first[1] != second[1] for first, second in between) == side_by_side


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
def test_expert_parallelism_on_eight_processes_matches_one(on, ep, out_of):
    settings = (f"moe.ep={ep}", f"moe.ep_axes=[{out_of}]", "model.layers=4", *(MORE if "pp" in on else ()))
    holds(on, *settings, *EVERYTHING)
    holds(on, *settings, "run.recompute=full", *EVERYTHING)


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.nightly)])
def test_three_axes_with_experts_match_one_process(steps):
    """Compare many steps within 1e-9: rounding errors accumulate, and a large learning rate amplifies them."""
    holds("pp=2 dp_shard=2 tp=2", "moe.ep=2", *EVERYTHING, steps=steps, bound=1e-9)
