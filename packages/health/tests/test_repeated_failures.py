"""`health.monitors.repeated`: a start that fails at the same step takes an older checkpoint, then stops."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gangline.health import Action, Agreed, Response, Verdict
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline.run.ending import read_ending
from gangline_health.config import Budget, Playbooks
from gangline_health.monitors.repeated import RepeatedMonitor
from gangline_health.playbooks import respond
from gangline_testkit.real_runs import RealRuns

KILLED = "rank 1 failed first: it was killed by SIGKILL"
ON_GPU = "rank 1 failed first: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"
ON_CPU = "rank 0 failed first: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


def written(run_dir: Path, reached: list[int], why: list[str], evidence: str = KILLED, start: str = "step-00000040"):
    """Write the files of a run with `len(why)` starts. reached: last step of each start except the newest start."""
    events, steps, best = [], [], 0
    for generation, reason in enumerate(why, 1):
        new = generation > 1 and reached[generation - 2] > best
        best = max(best, reached[generation - 2]) if generation > 1 else 0
        word, _, after = reason.partition(" ")
        futile = 0 if reason == "start" or new else events[-2]["futile"] + 1
        about = {"generation": generation, "futile": futile, "evidence": evidence, "after": after}
        events.append({"event": "launch", "by": "launcher", "why": word, **about})
        events.append({"event": "verdict", "by": "rank", "generation": generation, "step": 40})
        if generation <= len(reached):
            steps += [{"step": step, "generation": generation} for step in range(41, reached[generation - 1] + 1)]
    (run_dir / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in steps) + '{"step": 99, "gen')
    attempts.append(run_dir, Attempt(1, start, why="resume"))


def test_repeated_failures_are_counted_across_jobs(tmp_path: Path) -> None:
    """Check a scheduler or a loop that repeats the command, so that each start is the first start of a job."""
    written(tmp_path, [47, 46, 47], ["start", "start bug", "rank", "start killed"])
    (verdict,) = found(tmp_path)
    assert verdict.details["row"] == 3
    back = respond_to([verdict])
    assert back is not None
    assert back.action is Action.ROLL_BACK


def found(run_dir: Path, every: int | None = 20) -> list[Verdict]:
    return list(RepeatedMonitor(str(run_dir), every).before_run())


def respond_to(found: list[Verdict], history: tuple[Attempt, ...] = ()) -> Response | None:
    return respond(Playbooks(), Budget(), Agreed(tuple(found), history), 41)


def test_third_failure_takes_older_checkpoint_then_stops(
    tmp_path: Path,
) -> None:
    written(tmp_path, [47, 47], ["start", "rank", "rank"])
    (verdict,) = found(tmp_path)
    assert (verdict.kind, verdict.where, verdict.details["row"]) == ("repeated-failure", "step 48", 2)
    assert respond_to([verdict]) is None, "a warning, for now"
    written(tmp_path, [47, 46, 47], ["start", "rank", "rank", "rank"])
    (verdict,) = found(tmp_path)
    assert f"3 consecutive starts failed in step 48; last failure: {KILLED}" in verdict.evidence
    first = respond_to([verdict])
    assert first is not None
    assert (first.action, first.before_step, first.skip) == (Action.ROLL_BACK, 40, 0)
    line = Attempt(2, "step-00000020", action="roll_back", kinds=("repeated-failure",), step=40)
    then = respond_to([verdict], (line,))
    assert then is not None
    assert then.action is Action.STOP


@pytest.mark.parametrize(
    ("start", "before"), [("step-00000047", 41), ("step-00000060", 60), ("step-00000007", 1)], ids=str
)
def test_rollback_from_memory_checkpoint_is_older(tmp_path: Path, start: str, before: int) -> None:
    written(tmp_path, [47, 47, 47], ["start", "rank", "rank", "rank"], start=start)
    (verdict,) = found(tmp_path)
    back = respond_to([verdict])
    assert back is not None
    assert back.before_step == before


@pytest.mark.parametrize(
    ("reached", "why"),
    [
        ([47, 52, 58], ["start", "rank", "rank", "rank"]),
        ([47, 43, 47], ["start", "rank", "rank", "rank"]),
        ([47, 47, 47], ["start", "rank", "rank", "node"]),
        ([47, 47, 47], ["start", "rank", "rank", "response"]),
        ([47, 47, 47], ["start", "rank", "rank", "start preempted"]),
        ([], ["start"]),
    ],
    ids=["each goes further", "elsewhere", "a node was lost", "a response", "a new job", "the first start"],
)
def test_unrelated_failures_are_not_repeated_failures(tmp_path: Path, reached: list[int], why: list[str]) -> None:
    written(tmp_path, reached, why)
    assert found(tmp_path) == []


@pytest.mark.parametrize("evidence", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_repeated_out_of_memory_stops_the_run(tmp_path: Path, evidence: str) -> None:
    written(tmp_path, [47, 47], ["start", "rank", "rank"], evidence)
    (verdict,) = found(tmp_path)
    assert (verdict.kind, verdict.where) == ("out-of-memory", "step 48")
    assert "lower batch.micro_size, set run.recompute=full" in verdict.evidence
    stop = respond_to([verdict])
    assert stop is not None
    assert stop.action is Action.STOP


def appended(path: Path, *lines: dict) -> None:
    with path.open("a") as file:
        file.writelines("\n" + json.dumps(line) for line in lines)
        file.write("\n")


@pytest.mark.parametrize(("died_at", "same"), [(27, False), (41, True), (None, False)], ids=str)
def test_failure_after_rollback_counts_at_its_step(tmp_path: Path, died_at: int | None, same: bool) -> None:
    """Check that events of a rollback, which hold the step rolled back from, do not change the step of the failure."""
    written(tmp_path, [40, 40, 40], ["start", "rank", "rank", "rank"])
    for step in (40, 41):  # requested before the first step, or after it
        about = {"by": "rank", "generation": 4, "attempt": 1, "step": step}
        appended(tmp_path / "events.jsonl", {"event": "response", "action": "roll_back", **about})
        appended(tmp_path / "events.jsonl", {"event": "phase", "phase": "recovery", "at": "end", **about})
        appended(tmp_path / "metrics.jsonl", {"generation": 4, "attempt": 1, "step": step})
    then = range(21, died_at or 0)
    appended(tmp_path / "metrics.jsonl", *({"generation": 4, "attempt": 2, "step": step} for step in then))
    lost = {"event": "launch", "by": "launcher", "why": "rank", "generation": 5, "futile": 4, "evidence": KILLED}
    appended(tmp_path / "events.jsonl", lost)
    assert [verdict.details["row"] for verdict in found(tmp_path)] == ([4] if same else [])


def test_single_out_of_memory_does_not_stop_run(tmp_path: Path) -> None:
    written(tmp_path, [47, 47], ["start", "rank", "rank"])
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    events[-2]["evidence"] = ON_GPU
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in events))
    (verdict,) = found(tmp_path)
    assert (verdict.kind, verdict.details["row"]) == ("repeated-failure", 2)
    assert respond_to([verdict]) is None, "a warning, for now"


@pytest.mark.parametrize("kills", [3, 4])
def test_repeated_kill_rolls_back_then_stops(tmp_path: Path, kills: int) -> None:
    """Check a fault that ends with the rollback (3 kills), and a fault that persists and stops the run (4 kills)."""
    words = ("run.steps=14", "checkpoint.every=4", "launch.processes=1", "launch.max_restarts=9")
    with RealRuns(tmp_path) as runs:
        faults = f"health.chaos.at=[{','.join(['kill@11:0'] * kills)}]"
        printed = runs.train("run.dir=out", *words, "health=[monitors,chaos]", faults, code=0 if kills == 3 else 3)
        back, *then = [line for line in attempts.read(tmp_path / "out") if line.action]
        assert (back.action, back.kinds, back.start, back.skipped) == (
            "roll_back",
            ("repeated-failure",),
            "step-00000004",
            0,
        )
        if kills == 4:
            assert [line.action for line in then] == ["stop"]
            ending = read_ending(tmp_path / "out")
            assert ending is not None
            assert (ending.reason, ending.requeue) == ("verdict", False)
            assert "consecutive starts failed in step 11" in printed
            return
        runs.train("run.dir=calm", *words)
        assert then == []
        assert runs.read_curve("out") == runs.read_curve("calm")


@pytest.mark.nightly
def test_repeated_job_failures_roll_back_then_stop(tmp_path: Path) -> None:
    """Check separate launchers for all starts, as if a queue or a person repeats the command."""
    words = ("run.dir=out", "run.steps=14", "checkpoint.every=4", "launch=elastic", "launch.agents=1")
    ranks = ("launch.processes=1", "launch.max_restarts=0", "health=[monitors,chaos]")
    faults = (
        f"health.chaos.at=[{','.join(['kill@11:0'] * 4)}]",
        "health.monitors.playbooks.repeated_failure.patience=2",
    )
    with RealRuns(tmp_path) as runs:
        for code in (1, 1, 1, 3):
            printed = runs.train(*words, *ranks, *faults, code=code)
    assert "3 consecutive starts failed in step 11" in printed
    lines = [(line.action, line.start) for line in attempts.read(tmp_path / "out") if line.action]
    assert [action for action, _ in lines] == ["roll_back", "stop"]
    assert lines[0][1] == "step-00000004", "an older one than that of the starts that failed"
    ending = read_ending(tmp_path / "out")
    assert ending is not None
    assert (ending.reason, ending.requeue, ending.exit_code) == ("verdict", False, 3)
