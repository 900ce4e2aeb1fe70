"""`health=chaos`: seeded fault plan, each fault injected once, runs that survive faults unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from gangline.run.events import read_events
from gangline_health.chaos.check import ChaosCheck
from gangline_health.chaos.plan import ANYWHERE, KINDS, FaultsDone, parse, plan
from gangline_testkit import HealthCheckSuite
from gangline_testkit.real_runs import RealRuns


@pytest.fixture
def runs(tmp_path: Path):
    with RealRuns(tmp_path) as found:
        yield found


class TestChaos(HealthCheckSuite):
    choice = "health=chaos"
    settings = ("health.chaos.at=[kill@1000000]",)


def test_fault_plan_depends_only_on_seed():
    drawn = plan(60, 900.0, 7, list(ANYWHERE), [])
    assert drawn == plan(60, 900.0, 7, list(ANYWHERE), [])
    assert drawn != plan(60, 900.0, 8, list(ANYWHERE), [])
    assert [fault.second for fault in drawn] == sorted(fault.second or 0.0 for fault in drawn)
    assert {fault.kind for fault in drawn} == set(ANYWHERE)
    assert len({fault.rank % 8 for fault in drawn}) == 8


@pytest.mark.parametrize("words", ["kill", "kill@", "burn@3", "kill@3:x", "kill@-1"])
def test_invalid_fault_is_refused(words):
    with pytest.raises(ValueError, match="is not a fault"):
        parse(words)


def test_every_kind_of_fault_has_a_method():
    """Check all kinds of faults, because only `benchmarks/chaos.py` injects some kinds."""
    methods = {name.removeprefix("_inject_").replace("_", "-") for name in vars(ChaosCheck) if "_inject_" in name}
    assert methods == set(KINDS)


def test_each_fault_is_claimed_once(tmp_path):
    first, second = plan(2, 10.0, 0, list(KINDS), [])
    one, other = FaultsDone(tmp_path), FaultsDone(tmp_path)
    assert one.claim(first)
    assert not other.claim(first)
    assert first in other
    assert second not in other
    assert one.began == other.began


def test_chaos_without_faults_is_refused(runs):
    assert "no fault is configured" in runs.expect_refusal("run.dir=out", "health=chaos")
    said = runs.expect_refusal("run.dir=out", "health=chaos", "health.chaos.at=[kill@9,nan@3]")
    assert "cannot inject nan into a run of one process" in said
    said = runs.expect_refusal("run.dir=out", "health=chaos", "health.chaos.faults=3")
    assert "cannot inject slow, hang, exception into a run of one process" in said
    assert "'burn@3' is not a fault" in runs.expect_refusal("run.dir=out", "health=chaos", "health.chaos.at=[burn@3]")


def test_losses_are_unchanged_by_kill_hang_and_exception(runs):
    """Check that each fault is injected once, and that the losses equal those of a run without faults bit for bit."""
    words = ("parallel=ddp", "launch.processes=4", "run.steps=60", "checkpoint.every=10", "run.seed=3")
    runs.train("run.dir=calm", *words)
    faults = "health.chaos.at=[kill@15:1,hang@30:2,exception@45:0]"
    printed = runs.train("run.dir=wild", *words, "launch.max_restarts=3", "health=[monitors,chaos]", faults)
    assert runs.read_curve("wild") == runs.read_curve("calm")
    events = read_events(runs.directory / "wild")
    done = [(line["kind"], line["rank"], line["step"]) for line in events if line["event"] == "fault"]
    assert done == [("kill", 1, 15), ("hang", 2, 30), ("exception", 0, 45)]
    (hang,) = [line for line in events if line["event"] == "verdict" and line["kind"] == "hang"]
    assert hang["details"]["ranks"] == [2]
    assert "all_reduce" in hang["details"]["operation"]
    assert "rank 2 failed first: hang" in printed
    assert "rank 0 failed first: RuntimeError: health=chaos: injected exception" in printed


def test_run_survives_nan_bit_flip_and_full_disk(runs):
    """Check playbooks that repeat the samples: losses equal those of a run without faults bit for bit."""
    words = ("parallel=ddp", "launch.processes=3", "batch.global_size=6", "run.steps=80", "checkpoint.every=10")
    runs.train("run.dir=calm", *words)
    again = [
        f"health.monitors.playbooks.{kind}.{word}"
        for kind in ("not_finite", "loss_spike", "gradient_spike")
        for word in ("actions=[roll_back]", "patience=1", "skip=false", "back=0")
    ]
    faults = "health.chaos.at=[disk-full@8:0,nan@40:1,bad-batch@55:2,bit-flip@68:1]"
    full = "health.chaos.full_steps=14"  # fails the saves of steps 10 and 20
    runs.train(
        "run.dir=wild", *words, "health=[monitors,chaos]", faults, full, "health.monitors.corruption.every=5", *again
    )
    assert runs.read_curve("wild") == runs.read_curve("calm")
    events = read_events(runs.directory / "wild")
    said = [(line["kind"], line["where"]) for line in events if line["event"] == "verdict"]
    assert "not-saved" in {kind for kind, _ in said}
    assert ("not-finite", "step 40") in said
    assert {("loss-spike", "step 55"), ("gradient-spike", "step 55")} & set(said)
    assert ("corruption", "rank 1") in said
    faults_done = [line for line in events if line["event"] == "fault"]
    assert [line["kind"] for line in faults_done] == ["disk-full", "nan", "bad-batch", "bit-flip"]
    assert {line["generation"] for line in faults_done} == {1}


def test_slow_rank_is_reported_with_its_cost(runs):
    words = (
        "parallel=ddp",
        "launch.processes=4",
        "run.steps=30",
        "health=[monitors,chaos]",
        "health.chaos.slow_steps=16",
    )
    # a busy machine also delays healthy ranks, but by less than `min_seconds`
    window = ("health.monitors.stragglers.window=8", "health.monitors.stragglers.min_seconds=0.2")
    runs.train("run.dir=out", *words, "health.chaos.at=[slow@12:3]", *window)
    found = [
        verdict
        for record in runs.read_records("out")
        for verdict in record["verdicts"]
        if verdict["kind"] == "straggler" and verdict["where"] == "rank 3"
    ]
    assert found
    assert found[0]["details"]["phase"] in ("forward", "backward", "other")
    assert found[0]["details"]["cost_seconds"] > 0.1
