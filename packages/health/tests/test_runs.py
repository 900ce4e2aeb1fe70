"""`health=monitors` in complete runs: bad data, budgets, refused options, a failing monitor."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from gangline import UserError
from gangline.comm.base import Comm
from gangline.config.check import check
from gangline.health import Agreed, Verdict
from gangline.record import StepRecord, read_records
from gangline.run import attempts
from gangline.run.events import Events, read_events
from gangline.train.rank import train
from gangline_basics.launch.failures import RankFailure
from gangline_health.check import WatchCheck
from gangline_health.config import WatchedHealth
from gangline_health.monitors.base import Monitor
from gangline_health.monitors.numbers import NumbersMonitor
from gangline_testkit.health import make_healthy
from gangline_testkit.runs import build_small_run
from gangline_testkit.sessions import open_session

G, STEPS = 8, 70
BAD = range(60 * G, 63 * G)  # samples of steps 61 to 63
HEALTH = (
    "health=[monitors]",
    "health.monitors.playbooks.loss_spike.back=4",
    f"run.steps={STEPS}",
    "checkpoint.every=2",
    "checkpoint.keep_last=null",
)


def run(run_dir: Path, bad: range, *settings: str) -> tuple[int, list[dict], list[attempts.Attempt]]:
    """Train with a loss five times as high on samples `bad`; return (exit code, records, responses)."""
    s = open_session(run_dir, *HEALTH, *settings)
    step = s.runtime.step

    def spoilt(microbatches):
        result = step(microbatches)
        return replace(result, loss_sum=5 * result.loss_sum) if s.cursor in bad else result

    s.runtime.step = spoilt  # type: ignore[method-assign]
    code = train(s)
    lines = [line for line in attempts.read(run_dir) if line.action]
    return code, read_records(run_dir / "metrics.jsonl"), lines


def test_lasting_spike_rolls_back_and_skips_batches(tmp_path: Path) -> None:
    code, records, (line,) = run(tmp_path / "out", BAD)
    assert code == 0
    assert (line.action, line.kinds, line.start) == ("roll_back", ("loss-spike",), "step-00000056")
    assert line.skipped_from == 56 * G
    assert line.skipped_from + line.skipped == BAD.stop
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert not any(record["skipped"] for record in records), "what stands was all applied"
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    left_out = [line["step"] for line in lines if line["skipped"]]
    assert left_out == [61, 62, 63]


def test_single_bad_batch_is_skipped(tmp_path: Path) -> None:
    code, records, lines = run(tmp_path / "out", range(BAD.start, BAD.start + 1))
    assert (code, lines) == (0, [])
    assert [record["step"] for record in records if record["skipped"]] == [61]


def test_unresolved_spike_stops_the_run_with_reason(tmp_path: Path) -> None:
    code, _, lines = run(tmp_path / "out", range(BAD.start, 10**9))
    assert code == 3
    assert [line.action for line in lines] == ["roll_back", "roll_back", "stop"]
    assert [line.start for line in lines[:2]] == ["step-00000056", "step-00000052"]
    assert lines[-1].why.endswith("response 3 to loss-spike without 200 steps of progress")


def test_non_finite_weights_are_not_saved(tmp_path: Path) -> None:
    s = open_session(tmp_path / "out", *HEALTH, "run.steps=12", "checkpoint.every=4")
    update, once = s.optimizer.step, [8]

    def breaks(learning_rate: float) -> None:
        update(learning_rate)
        if s.step + 1 in once:
            once.clear()
            s.runtime.parameters()[0].pieces[0].tensor.data.view(-1)[0] = float("nan")  # may be unused

    s.optimizer.step = breaks  # type: ignore[method-assign]
    assert train(s) == 0
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    (line,) = [line for line in attempts.read(tmp_path / "out") if line.action]
    assert (line.action, line.kinds, line.start) == ("roll_back", ("not-finite",), "step-00000004")
    assert [str(id) for id in s.checkpointer.list()] == ["step-00000004", "step-00000008.2", "step-00000012.2"]
    assert all(record["finite"] for record in records)
    assert [record["step"] for record in records] == list(range(1, 13))
    told = [line for line in read_events(tmp_path / "out") if line["event"] == "verdict"]
    (lost,) = [line["evidence"] for line in told if line["kind"] == "not-saved"]
    assert "the weights are not finite (rank 0: model/" in lost


def test_run_without_checkpoint_stops_with_reason(tmp_path: Path) -> None:
    code, _, lines = run(tmp_path / "out", range(BAD.start, 10**9), "checkpoint.every=null")
    assert (code, lines) == (3, [])
    (end,) = [line for line in read_events(tmp_path / "out") if line["event"] == "end"]
    assert "there is no checkpoint to roll back to" in end["evidence"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("checkpoint.every=5", "checkpoint.keep_last=2"), "keep_last=2 keep the checkpoints of the last 10 steps"),
        (
            ("checkpoint.every=10", "checkpoint.keep_last=9"),
            "corruption.every=100 may need an older checkpoint. Set checkpo",
        ),
        (("checkpoint.every=10", "checkpoint.keep_last=10"), ""),
        (("checkpoint.every=5", "checkpoint.keep_last=null"), ""),
    ],
)
def test_too_short_checkpoint_retention_for_rollback_gives_notice(words: tuple[str, ...], said: str) -> None:
    whole = build_small_run("health=[monitors]", "parallel=ddp", "launch.processes=2", "checkpoint=torch", *words)
    notices = [note for _, config in whole.iterate_parts() for note in config.list_notices(whole)]
    assert [said in note for note in notices] == ([True] if said else [])


def test_failed_monitor_is_named_and_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def observe(self, record):
        if record.step == 3:
            raise ZeroDivisionError("of its own")
        return ()

    monkeypatch.setattr(NumbersMonitor, "observe", observe)
    s = open_session(tmp_path / "out", "health=[monitors]", "run.steps=6")
    told: list[str] = []
    s.reporter.note = told.append  # type: ignore[assignment]
    assert train(s) == 0
    (failed,) = [line for line in told if "failed" in line]
    assert (
        "health.monitors.numbers raised an exception and is disabled from step 3 on: ZeroDivisionError: of its own"
        in failed
    )


class Counts(Monitor):
    """Monitor that counts its collectives, and raises an exception in step `raises` (0: never)."""

    name = "counts"

    def __init__(self, raises: int = 0) -> None:
        self.raises, self.collectives = raises, 0

    def describe(self) -> str:
        return "nothing"

    def collective(self, comm: Comm, step: int) -> None:
        self.collectives += 1

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        if record.step == self.raises:
            raise ZeroDivisionError
        return ()

    def state(self) -> dict[str, int]:
        return {"collectives": self.collectives}


def test_start_note_is_one_short_line() -> None:
    run = build_small_run("health=[monitors]")
    check = WatchCheck(cast(WatchedHealth, run.health["monitors"]), run)
    (note,) = [verdict for verdict in check.before_run() if verdict.kind == "monitors"]
    names = "numbers, corruption, rank_losses, stragglers, saves, repeated, machine"
    assert note.evidence.startswith(f"{names}; {len(note.details['playbooks'])} playbooks (details: events.jsonl)")
    assert len(note.evidence) < 200
    assert list(note.details["monitors"]) == names.split(", ")
    assert "pynvml" not in note.evidence or any(Path("/dev").glob("nvidia[0-9]*"))


def test_failed_monitor_is_disabled_on_all_ranks() -> None:
    """Check that no rank then enters the collective of the monitor, and that the states of the ranks are equal."""
    run = build_small_run("health=[monitors]")
    checks = [WatchCheck(cast(WatchedHealth, run.health["monitors"]), run) for _ in range(2)]
    mine = [Counts(), Counts(raises=3)]
    for each, monitor in zip(checks, mine, strict=True):
        each.monitors = {monitor.name: monitor}
    for record in make_healthy(6):
        for each in checks:
            each.before_step(record.step)
            each.collective(cast(Comm, None))
        found = tuple(verdict for each in checks for verdict in each.observe(record))
        assert [verdict.kind for verdict in found] == (["check-failed"] if record.step == 3 else [])
        for each in checks if found else ():
            each.respond(Agreed(found), record)
        assert checks[0].state() == checks[1].state()
    assert [monitor.collectives for monitor in mine] == [3, 3]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("health.monitors.playbooks.loss_spike.actions=[explode]", "must each be one of note, warn, skip, lower_rate"),
        ("health.monitors.playbooks.loss_spike.actions=[]", "health.monitors.playbooks.loss_spike.actions is empty"),
        ("health.monitors.playbooks.loss_spike.actions=[lower_rate]", "loss_spike.actions has lower_rate: set"),
        ("health.monitors.numbers.warmup=500", "health.monitors.numbers.warmup=500 must be at most"),
        ("health.monitors.playbooks.los_spike.back=1", "loss_spike"),
    ],
)
def test_invalid_options_are_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match="health") as caught:
        check(build_small_run("health=[monitors]", word))
    assert said in str(caught.value)


def test_invalid_playbook_action_error_shows_default() -> None:
    with pytest.raises(UserError, match="must each be one of note, warn") as caught:
        check(build_small_run("health=[monitors]", "health.monitors.playbooks.loss_spike.actions=[explode]"))
    assert "The default:  health.monitors.playbooks.loss_spike.actions=[roll_back" in str(caught.value)


def test_only_monitor_failing_in_collective_is_disabled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the first start fails and names the monitor, and that the next start runs the other monitors."""

    def collective(self, comm, step):
        raise OSError("no such driver")

    monkeypatch.setattr(NumbersMonitor, "collective", collective)
    with pytest.raises(OSError, match="no such driver") as raised:
        train(open_session(tmp_path / "out", "health=[monitors]", "run.steps=6"))
    member = RankFailure.of(0, raised.value).member
    assert member == "health/monitors/numbers"
    events = Events(tmp_path / "out")
    events.write("launch", why="rank", member=member, evidence="no such driver")
    events.close()
    s = open_session(tmp_path / "out", "health=[monitors]", "run.steps=6")
    assert train(s) == 0
    check = s.health["monitors"]
    assert isinstance(check, WatchCheck)
    assert "numbers" not in check.monitors
    assert "corruption" in check.monitors
