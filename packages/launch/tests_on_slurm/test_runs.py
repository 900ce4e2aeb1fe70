"""Runs on a real Slurm, from submit to the last checkpoint, with the loss curve of an undisturbed run."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from conftest import MANY, STEPS

from gangline.run.ending import read_ending
from gangline.run.events import read_events

DDP = ("parallel=ddp", "launch=slurm", "launch.nodes=2", "launch.processes=2")


def wait_for(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """Return the result of `what` as soon as it is true."""
    deadline = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return found


def same(curve: list, other: list) -> None:
    assert [step for step, *_ in curve] == [step for step, *_ in other]
    for (_, loss, norm), (_, loss2, norm2) in zip(curve, other, strict=True):
        assert loss == pytest.approx(loss2, rel=1e-12)
        assert norm == pytest.approx(norm2, rel=1e-10)


def launches(out: Path) -> list[dict]:
    return [line for line in read_events(out) if line["event"] == "launch"]


def job(out: Path) -> str:
    return json.loads((out / "launch" / "job.json").read_text())["id"]


def requeues(out: Path) -> list[dict]:
    """Return the records of the ends of starts, without the first record, which is the submission."""
    begin, *ends = [json.loads(line) for line in (out / "launch" / "requeues.jsonl").read_text().splitlines()]
    assert begin["then"] == "begin"
    return ends


def test_four_node_losses_match_one_process(slurm, runs, undisturbed):
    printed = runs.finish(runs.start("run.dir=out", "parallel=3d", "launch=slurm", "launch.nodes=4"))
    same(runs.read_curve("out"), undisturbed[:STEPS])
    out = runs.directory / "out"
    assert "running on n[1-4]" in printed
    assert f"step {STEPS}/{STEPS}" in printed  # printed by the run itself
    assert "completed" in printed
    assert (out / "launch" / "job.sh").read_text().startswith("#!/bin/bash")
    assert json.loads((out / "launch" / "job.json").read_text())["scheduler"] == "slurm"
    assert read_ending(out).reason == "done"
    launch = launches(out)[0]
    assert (launch["nodes"], launch["processes"]) == (["n1", "n2", "n3", "n4"], 8)
    explained = verb(runs, "explain", "out")
    assert "spine.rack0.n1: ranks 0 to 1" in explained
    assert "spine.rack1.n4: ranks 6 to 7" in explained
    assert "tp 2: ranks communicate over the node" in explained
    assert f"step {STEPS} of {STEPS}" in verb(runs, "status", "out")
    assert "rank-00007.log" in verb(runs, "logs", "out")


def test_spare_replaces_lost_node(slurm, runs, undisturbed):
    process = runs.start("run.dir=out", *DDP, "launch.spares=1")
    runs.wait_for_step(process, "out", 6)
    out = runs.directory / "out"
    one, lost, spare = launches(out)[-1]["nodes"]
    slurm.kill_node(lost)
    printed = runs.finish(process)
    same(runs.read_curve("out"), undisturbed[:STEPS])
    last = launches(out)[-1]
    assert (last["nodes"], last["processes"], last["why"]) == ([one, spare], 2, "node")
    assert f"nodes lost: {lost}" in printed


def test_run_restarts_after_notice_preemption_and_exclusion(slurm, runs, undisturbed):
    """Stop one run by a notice, a preemption and an excluded node; it matches the curve of one process."""
    process = runs.start("run.dir=out", *DDP, "checkpoint.every=1000", f"run.steps={MANY}")
    out = runs.directory / "out"
    wait_for(lambda: len([*out.glob("launch/clocks/n*")]) == 2)  # both agents have started
    slurm.ask("scancel", "--signal=USR1", job(out))  # like Slurm: to all processes; no step can be saved yet
    runs.wait_for_step(process, "out", 5)
    early = requeues(out)  # the job is requeued if the agents had joined, with nothing to save; else they ignore it
    assert [(one["reason"], one["then"]) for one in early] in ([], [("preempted", "requeue")])
    slurm.ask("scancel", "--signal=USR1", job(out))
    (notice,) = wait_for(lambda: requeues(out)[len(early) :])
    assert (notice["code"], notice["reason"], notice["then"]) == (75, "preempted", "requeue")

    runs.wait_for_step(process, "out", notice["step"] + 3)
    starts = [json.loads(text) for text in (out / "attempts.jsonl").read_text().splitlines()]
    assert starts[-1]["start"] == f"step-{notice['step']:08d}"  # no step was repeated
    before = len(launches(out))
    slurm.ask("sbatch", "--partition=urgent", "--nodes=5", "--exclusive", "--wrap=sleep 1", "--output=/dev/null")
    wait_for(lambda: len(launches(out)) > before)

    runs.wait_for_step(process, "out", runs.read_records("out")[-1]["step"] + 3)
    bad, first = launches(out)[-1]["nodes"][0], job(out)
    with (out / "attempts.jsonl").open("a") as file:
        line = {"attempt": 1, "start": None, "why": "a finding", "action": "exclude", "exclude": [bad], "step": 5}
        file.write(json.dumps({**line, "time": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")
    slurm.ask("scancel", "--signal=USR1", first)
    printed = runs.finish(process)
    same(runs.read_curve("out"), undisturbed)
    assert "restarted" in printed
    assert job(out) != first
    *_, submit, last = requeues(out)
    assert submit["then"] == "submit"
    assert (last["reason"], last["then"]) == ("done", "end")
    assert bad not in launches(out)[-1]["nodes"]


def test_injected_faults_are_reported_across_requeue(slurm, runs, undisturbed):
    """Inject a hang, an exception and a kill of all processes into a job with health=monitors."""
    from gangline_health.ledger.report import build_ledger

    faults = "health.chaos.at=[stop@5:1,exception@9:0,kill-all@13:1]"
    printed = runs.finish(runs.start("run.dir=out", *DDP, "health=[monitors,chaos]", faults))
    same(runs.read_curve("out"), undisturbed[:STEPS])
    out = runs.directory / "out"
    (hang,) = [line for line in read_events(out) if line["event"] == "verdict" and line["kind"] == "hang"]
    assert (hang["where"], hang["details"]["why"]) == ("rank 1", "stopped")
    assert [line["why"] for line in launches(out)] == ["start", "rank", "rank", "start"], printed
    first, second, third, requeued = launches(out)
    assert second["evidence"].startswith("rank 1 failed first: hang: rank 1")
    assert third["evidence"] == "rank 0 failed first: RuntimeError: health=chaos: injected exception"
    assert (first["after"], requeued["after"], requeued["config"]) == ("", "killed", first["config"])
    assert [line["then"] for line in requeues(out)] == ["requeue", "end"]
    of = build_ledger(out)
    assert sum(of.seconds.values()) == pytest.approx(of.wall_seconds, abs=1e-6)
    assert [fault.kind for fault in of.faults] == ["rank", "rank", "killed"]
    assert of.faults[-1].named == "all ranks were killed before one reported an error"


def test_sweep_is_one_array_with_result_table(slurm, runs):
    one = ("parallel=ddp", "launch=slurm", "launch.nodes=1", "launch.processes=1")
    words = ("-m", "run.dir=sweep", "run.seed=1,2", "run.steps=4", "schedule.warmup_steps=0", *one)
    printed = runs.finish(runs.start(*words))
    for number in (0, 1):
        assert [step for step, *_ in runs.read_curve(f"sweep/{number:02d}")] == [1, 2, 3, 4]
    assert job(runs.directory / "sweep" / "00") == job(runs.directory / "sweep" / "01")
    assert "varied options" in printed
    assert "run.seed=2" in printed


def test_detached_job_can_be_attached_and_cancelled(slurm, runs):
    blocker = slurm.ask("sbatch", "--parsable", "--nodes=5", "--exclusive", "--wrap=sleep 900", "--output=/dev/null")
    place = "it's a dir"
    process = runs.start(f'run.dir="{place}"', *DDP, "run.steps=100000")
    out = runs.directory / place
    wait_for((out / "launch" / "job.json").exists)
    wait_for(lambda: "Resources: waiting for free nodes" in verb(runs, "status", place))
    os.killpg(process.pid, signal.SIGINT)
    assert f"gangline launch attach {shlex.quote(place)}" in runs.finish(process, 130)
    assert "has a job already" in runs.finish(runs.start(f"resume={place}"), 2)
    slurm.ask("scancel", blocker.strip())
    attached = follower(runs, place)
    runs.wait_for_step(attached, place, 3)
    assert "of 100000" in verb(runs, "status", place)
    assert "is cancelled" in verb(runs, "cancel", place)
    printed, _ = attached.communicate(timeout=240)
    assert attached.returncode != 0
    assert f"train resume={shlex.quote(place)}" in printed
    slurm.wait_idle(slurm.names())  # waits until no process of the job is left
    assert slurm.queue() == []
    assert "has already ended" in verb(runs, "cancel", place)


def test_a_job_that_would_never_start_is_refused(slurm, runs):
    printed = runs.finish(runs.start("run.dir=out", *DDP, "launch.partition=narrow"), 2)
    assert "can never start: PartitionNodeLimit" in printed
    assert "launch.nodes" in printed
    assert slurm.queue() == []
    printed = runs.finish(runs.start("run.dir=many", *DDP[:2], "launch.nodes=8", "launch.processes=8"), 2)
    assert "can never start" in printed
    assert not (runs.directory / "many").exists()
    printed = runs.finish(runs.start("run.dir=nowhere", *DDP, "launch.partition=nowhere"), 2)
    assert "Partitions: main" in printed


def follower(runs, place: str) -> subprocess.Popen[str]:
    """Start `gangline launch attach` in the background."""
    command = [sys.executable, "-m", "gangline", "launch", "attach", place]
    environment = {**os.environ, **runs.environment}
    return subprocess.Popen(
        command, cwd=runs.directory, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def verb(runs, *words: str) -> str:
    """Return the output of `gangline launch WORDS`."""
    command = [sys.executable, "-m", "gangline", "launch", *words]
    environment = {**os.environ, **runs.environment}
    done = subprocess.run(command, cwd=runs.directory, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
