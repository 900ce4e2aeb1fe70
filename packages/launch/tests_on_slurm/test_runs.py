"""Runs on a real Slurm: from the submit to the last checkpoint, with the curve of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gangline.tools import read_ending, read_events

DDP = ("parallel=ddp", "launch=slurm", "launch.nodes=2", "launch.processes=2")


def wait_for(what: Callable[[], Any], seconds: float = 240.0) -> Any:
    """What `what` gives, as soon as it is true."""
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
    """The ends of starts; the first line is the submit."""
    begin, *ends = [json.loads(line) for line in (out / "launch" / "requeues.jsonl").read_text().splitlines()]
    assert begin["then"] == "begin"
    return ends


def test_four_nodes_draw_the_curve_of_one_process(slurm, runs, undisturbed):
    printed = runs.finish(runs.start("run.dir=out", "parallel=3d", "launch=slurm", "launch.nodes=4"))
    same(runs.curve("out"), undisturbed)
    out = runs.directory / "out"
    assert "running on n[1-4]" in printed
    assert f"step {len(undisturbed)}/{len(undisturbed)}" in printed  # the run's own line
    assert "completed" in printed
    assert (out / "launch" / "job.sh").read_text().startswith("#!/bin/bash")
    assert json.loads((out / "launch" / "job.json").read_text())["scheduler"] == "slurm"
    assert read_ending(out).reason == "done"
    launch = launches(out)[0]
    assert (launch["nodes"], launch["processes"]) == (["n1", "n2", "n3", "n4"], 8)


def test_a_spare_takes_the_place_of_a_node_that_is_lost(slurm, runs, undisturbed):
    process = runs.start("run.dir=out", *DDP, "launch.spares=1")
    runs.wait_for_step(process, "out", 6)
    out = runs.directory / "out"
    one, lost, spare = launches(out)[-1]["nodes"]
    slurm.kill_node(lost)
    printed = runs.finish(process)
    same(runs.curve("out"), undisturbed)
    last = launches(out)[-1]
    assert (last["nodes"], last["processes"], last["why"]) == ([one, spare], 2, "node")
    assert f"gone: {lost}" in printed


def test_a_job_that_urgent_work_preempts_is_queued_again(slurm, runs, undisturbed):
    process = runs.start("run.dir=out", *DDP)
    runs.wait_for_step(process, "out", 5)
    slurm.ask("sbatch", "--partition=urgent", "--nodes=5", "--exclusive", "--wrap=sleep 1", "--output=/dev/null")
    printed = runs.finish(process)
    same(runs.curve("out"), undisturbed)
    assert "started again" in printed
    assert len(launches(runs.directory / "out")) >= 2


def test_the_notice_before_the_end_of_the_time_saves_and_queues_again(slurm, runs, undisturbed):
    process = runs.start("run.dir=out", *DDP, "checkpoint.every=1000")
    runs.wait_for_step(process, "out", 5)
    slurm.ask("scancel", "--signal=USR1", job(runs.directory / "out"))  # as Slurm: to all processes
    runs.finish(process)
    same(runs.curve("out"), undisturbed)
    out = runs.directory / "out"
    (line, last) = requeues(out)
    assert (line["code"], line["reason"], line["then"]) == (75, "preempted", "requeue")
    assert (last["reason"], last["then"]) == ("done", "end")
    starts = [json.loads(text) for text in (out / "attempts.jsonl").read_text().splitlines()]
    assert starts[-1]["start"] == f"step-{line['step']:08d}"  # no step was done twice


def test_nodes_that_an_order_excludes_are_left_out(slurm, runs, undisturbed):
    process = runs.start("run.dir=out", *DDP)
    runs.wait_for_step(process, "out", 5)
    out = runs.directory / "out"
    bad, first = launches(out)[0]["nodes"][0], job(out)
    with (out / "attempts.jsonl").open("a") as file:
        line = {"attempt": 1, "start": None, "why": "a finding", "order": "exclude", "exclude": [bad], "step": 5}
        file.write(json.dumps({**line, "time": datetime.now(UTC).isoformat(timespec="seconds")}) + "\n")
    slurm.ask("scancel", "--signal=USR1", first)
    runs.finish(process)
    same(runs.curve("out"), undisturbed)
    assert job(out) != first
    assert requeues(out)[0]["then"] == "submit"
    assert bad not in launches(out)[-1]["nodes"]


def test_a_sweep_is_one_array_and_ends_with_a_table(slurm, runs):
    words = ("-m", "run.dir=sweep", "run.seed=1,2", "run.steps=4", "schedule.warmup_steps=0", *DDP)
    printed = runs.finish(runs.start(*words))
    for number in (0, 1):
        assert [step for step, *_ in runs.curve(f"sweep/{number:02d}")] == [1, 2, 3, 4]
    assert job(runs.directory / "sweep" / "00") == job(runs.directory / "sweep" / "01")
    assert "what varied" in printed
    assert "run.seed=2" in printed


def test_a_job_that_is_cancelled_leaves_nothing_running(slurm, runs):
    process = runs.start("run.dir=out", *DDP, "run.steps=100000")
    runs.wait_for_step(process, "out", 3)
    assert "is cancelled" in verb(runs, "cancel", "out")
    printed, _ = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "train resume=out" in printed
    slurm.wait_idle(slurm.names())  # no process of the job is left on any node
    assert slurm.queue() == []
    assert "is over already" in verb(runs, "cancel", "out")


def test_ctrl_c_detaches_and_another_terminal_attaches(slurm, runs, undisturbed):
    slurm.ask("sbatch", "--nodes=5", "--exclusive", "--wrap=sleep 8", "--output=/dev/null")  # the queue is full
    process = runs.start("run.dir=out", *DDP)
    out = runs.directory / "out"
    wait_for((out / "launch" / "job.json").exists)
    wait_for(lambda: "Resources: nodes are taken" in verb(runs, "status", "out"))
    os.killpg(process.pid, signal.SIGINT)
    printed = runs.finish(process, 130)
    assert "gangline launch attach out" in printed
    refused = runs.finish(runs.start("resume=out"), 2)
    assert "has a job already" in refused
    assert "completed" in verb(runs, "attach", "out")
    same(runs.curve("out"), undisturbed)
    assert f"step {len(undisturbed)} of {len(undisturbed)}" in verb(runs, "status", "out")
    assert "ranks 0 to 0" in verb(runs, "explain", "out")
    assert "rank-00000.log" in verb(runs, "logs", "out")


def test_a_job_that_would_never_start_is_refused(slurm, runs):
    printed = runs.finish(runs.start("run.dir=out", *DDP, "launch.partition=narrow"), 2)
    assert "would never start: PartitionNodeLimit" in printed
    assert "launch.nodes" in printed
    assert slurm.queue() == []
    printed = runs.finish(runs.start("run.dir=many", *DDP[:2], "launch.nodes=8", "launch.processes=8"), 2)
    assert "would never start" in printed
    assert not (runs.directory / "many").exists()
    printed = runs.finish(runs.start("run.dir=nowhere", *DDP, "launch.partition=nowhere"), 2)
    assert "Partitions: main" in printed


def verb(runs, *words: str) -> str:
    """What `gangline launch WORDS` prints."""
    command = [sys.executable, "-m", "gangline", "launch", *words]
    environment = {**os.environ, **runs.environment}
    done = subprocess.run(command, cwd=runs.directory, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
