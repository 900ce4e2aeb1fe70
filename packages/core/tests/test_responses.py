"""Verdicts of health checks and the resulting responses, in real runs that are killed and resumed."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace

import pytest

from gangline.errors import BadCheckpoint, UserError
from gangline.health import Action, Agreed, HealthCheck, Response, Verdict, decide
from gangline.launch.errors import RestartWanted
from gangline.pulse import layout, memory, write
from gangline.record import read_records
from gangline.run import attempts, events
from gangline.run.attempts import Attempt
from gangline.train.callbacks import attach
from gangline.train.rank import train
from gangline_basics.checkpoint.torch_dcp import DcpCheckpointer
from gangline_testkit.pool import get_pool
from gangline_testkit.processes import kill
from gangline_testkit.sessions import open_session

G = 8  # samples per step


@dataclass
class Scripted(HealthCheck):
    """Health check that returns scripted verdicts at given steps and a scripted response."""

    at: dict[int, Action]
    response: Response | None = None
    budget: int = 1
    before: dict[int, Action] | None = None
    first: Action | None = None

    def __post_init__(self) -> None:
        self.step = 0

    def before_run(self) -> Iterable[Verdict]:
        if self.first is not None:
            yield Verdict("bad-machine", "rank 0", 1.0, "1 of 8 links", self.first)

    def before_step(self, step: int) -> None:
        self.step = step

    def observe(self, record) -> Iterable[Verdict]:
        if record.step in self.at:
            yield Verdict("spike", f"step {record.step}", 1.0, f"loss {record.loss}", self.at[record.step])

    def respond(self, agreed: Agreed, record) -> Response | None:
        done = sum(len(agreed.list_responses("spike", action)) for action in Action)
        return self.response if self.response and agreed.select("spike") and done < self.budget else None


class Asked(Scripted):
    def before_update(self, loss: float, grad_norm: float) -> Iterable[Verdict]:
        if self.before and self.step in self.before:
            yield Verdict("gradient", f"step {self.step}", 1.0, f"norm {grad_norm}", self.before[self.step])


def run(run_dir, check: HealthCheck | None, *settings: str) -> int | str:
    """Run one start of a run and return its exit code, or "restart"."""
    s = open_session(run_dir, "run.steps=8", *settings)
    if check is not None:
        s.health["scripted"] = check
    try:
        return train(s)
    except RestartWanted:
        return "restart"


def started(run_dir, *settings: str) -> list[int]:
    """Train without a check to the end, and return the first sample of each step of this session."""
    s = open_session(run_dir, "run.steps=8", *settings)
    found, take = [], s.batches.take
    s.batches.take = lambda cursor, *rest: found.append(cursor) or take(cursor, *rest)
    train(s)
    return found


def read_responses(run_dir) -> list[Attempt]:
    return [line for line in attempts.read(run_dir) if line.action]


# --- training loop ---


def test_skipped_samples_stay_skipped_after_kill(tmp_path):
    class Dies(Scripted):
        def after_step(self, record, applied):
            if record.attempt == 2:
                raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(out, Dies({5: Action.ROLL_BACK}))
    (line,) = read_responses(out)
    assert (line.attempt, line.start, line.action, line.kinds, line.step) == (
        2,
        "step-00000004",
        "roll_back",
        ("spike",),
        5,
    )
    assert (line.skipped_from, line.skipped) == (4 * G, G)
    assert started(out) == [5 * G, 6 * G, 7 * G, 8 * G], "the samples of step 5 come never again"
    written = [json.loads(text) for text in (out / "metrics.jsonl").read_text().splitlines()]
    assert (5, 1) in [(record["step"], record["attempt"]) for record in written]
    assert [(record["step"], record["attempt"]) for record in read_records(out / "metrics.jsonl")] == [
        *((step, 1) for step in range(1, 5)),
        *((step, 2) for step in range(5, 9)),
    ]
    told = events.read_events(out)
    assert [line["action"] for line in told if line["event"] == "response"] == ["roll_back"]
    assert [line["kind"] for line in told if line["event"] == "verdict"] == ["spike"]
    assert [line["event"] for line in told].count("start") == 2
    phases = [(line["phase"], line["at"]) for line in told if line["event"] == "phase"]
    assert ("recovery", "begin") in phases
    assert phases.count(("restore", "end")) == 2
    assert told[-1]["why"] == "done"
    assert all(line["monotonic"] > 0 and line["time"] for line in told)


def test_resume_refuses_samples_skipped_beyond_the_cursor(tmp_path):
    class Dies(Scripted):
        def after_step(self, record, applied):
            if record.attempt == 2:
                raise KeyboardInterrupt

    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        run(out, Dies({5: Action.ROLL_BACK}))
    assert started(out)[-1] == 8 * G
    lines = attempts.read(out)
    (out / "attempts.jsonl").unlink()
    for line in lines:
        attempts.append(out, replace(line, skipped=line.skipped and 99 * G))
    with pytest.raises(UserError) as refused:
        open_session(out, "run.steps=10")
    assert f"attempt 2 skips the samples from {4 * G} to {103 * G - 1}." in str(refused.value)
    assert f"later checkpoint step-00000008.2 has read only up to sample {9 * G - 1}." in str(refused.value)


def test_response_budget_survives_rollback(tmp_path):
    back = Response(Action.ROLL_BACK, ("spike",), before_step=4, skip=0, rate=0.5, rate_steps=4)
    assert run(tmp_path / "out", Scripted({5: Action.STOP}, back, budget=2)) == 3
    assert [(line.action, line.start, line.skipped) for line in read_responses(tmp_path / "out")] == [
        ("roll_back", "step-00000002", 0),
        ("roll_back", "step-00000002", 0),
        ("stop", "step-00000004.3", 0),
    ]
    rates = {record["step"]: record["learning_rate"] for record in read_records(tmp_path / "out" / "metrics.jsonl")}
    assert rates[3] == rates[1] / 4, "two cuts, both after step 2"


def test_reduced_learning_rate_survives_a_kill(tmp_path):
    out = tmp_path / "out"
    cut = Response(Action.NOTE, ("spike",), rate=0.5, rate_steps=3)

    class Dies(Scripted):
        def after_step(self, record, applied):
            if record.step == 4:  # before the checkpoint of step 4, so that step 3 is repeated
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(out, Dies({3: Action.STOP}, cut))
    assert run(out, Scripted({3: Action.STOP}, cut)) == 0
    rates = [record["learning_rate"] for record in read_records(out / "metrics.jsonl")]
    assert [rate / rates[0] for rate in rates] == [1, 1, 1, 0.5, 0.5, 0.5, 1, 1]
    assert len(read_responses(out)) == 1


@pytest.mark.parametrize(("first", "code"), [(Action.STOP, 3), (Action.RESTART, "restart"), (Action.WARN, 0)])
def test_verdict_before_first_step_is_applied(tmp_path, first, code):
    out = tmp_path / "out"
    assert run(out, Scripted({}, first=first), "run.steps=1") == code
    assert [line.action for line in read_responses(out)] == ([first.name.lower()] if code else [])
    assert (out / "metrics.jsonl").read_text().count("\n") == (code == 0)


def test_step_skipped_by_check_reports_no_overflow(tmp_path, monkeypatch):
    s = open_session(tmp_path / "out", "run.steps=3")
    s.health["asked"] = Asked({}, before={2: Action.SKIP})
    overflows: list[bool] = []
    monkeypatch.setattr(s.precision, "update", lambda found_inf: overflows.append(found_inf))
    train(s)
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [bool(record["skipped"]) for record in records] == [False, True, False]
    assert "gradient at step 2" in records[1]["skipped"]
    assert records[1]["finite"]
    assert records[1]["verdicts"]
    assert overflows == [False, False, False]
    assert s.optimizer.state()["steps"] == 2


def test_restart_may_load_earlier_checkpoint(tmp_path):
    out = tmp_path / "out"
    back = Response(Action.RESTART, ("spike",), before_step=4, exclude=("node-7",))
    assert run(out, Scripted({5: Action.STOP}, back)) == "restart"
    (line,) = read_responses(out)
    assert (line.attempt, line.start, line.skipped, line.exclude) == (2, "step-00000002", 0, ("node-7",))
    assert started(out) == [2 * G, 3 * G, 4 * G, 5 * G, 6 * G, 7 * G]


def test_rollback_without_checkpoint_stops_the_run(tmp_path):
    assert run(tmp_path / "out", Scripted({1: Action.ROLL_BACK})) == 3
    (end,) = [line for line in events.read_events(tmp_path / "out") if line["event"] == "end"]
    assert "no checkpoint to roll back to" in end["evidence"]


def test_rollback_falls_back_to_oldest_checkpoint(tmp_path):
    """Roll back to the oldest checkpoint if the run is too short to have one before `before_step`."""
    out = tmp_path / "out"
    back = Response(Action.ROLL_BACK, ("spike",), before_step=1, else_before=5, why="the first of three tries")
    assert run(out, Once({7: Action.STOP}, back)) == 0
    (line,) = read_responses(out)
    assert (line.start, line.skipped_from) == ("step-00000002", 2 * G), "not step 4, which is nearer to the trouble"
    assert line.why.endswith("; the first of three tries")
    never = Response(Action.ROLL_BACK, ("spike",), before_step=1, else_before=2)
    assert run(tmp_path / "none", Scripted({7: Action.STOP}, never)) == 3


def of_two_minds(run_dir) -> list:
    s = open_session(run_dir, "run.steps=2", "parallel=ddp")
    s.health["scripted"] = Scripted({1: Action.STOP}, Response(Action.WARN, ("spike",)) if s.comms.rank == 0 else None)
    return [train(s), s.step]


@pytest.mark.parametrize("world", [1, 2])
def test_nonfinite_weights_are_not_saved(tmp_path, world):
    """Write a NaN into a run without health checks, which ends with an error instead of a checkpoint of NaN."""
    run_ranks = get_pool(world).run if world > 1 else lambda call, *words: [call(*words)]
    for said in run_ranks(one_weight_is_nan, tmp_path / "out", "parallel=ddp" if world > 1 else "parallel=single"):
        assert f"the weights are not finite (rank {world - 1}: model/" in said
        assert "The newest complete checkpoint is step-00000006" in said
        assert "Continue from that checkpoint: train resume=" in said


def test_nonfinite_weights_stop_run_at_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "gangline.train.save.find_nonfinite_weights", lambda s: "rank 0: model/x" if s.step == 4 else ""
    )
    assert run(tmp_path / "out", None) == 3
    (line,) = read_responses(tmp_path / "out")
    assert (line.action, line.kinds, line.step, line.start) == ("stop", ("not-finite",), 5, "step-00000002")
    assert "the weights are not finite (rank 0: model/x); newest complete checkpoint: step-00000002" in line.why


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "Fix the cause, then"),
        (errno.EROFS, "Make the store writable, then"),
    ],
)
def test_advice_after_failed_save_depends_on_error(tmp_path, monkeypatch, number, words):
    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("torch.distributed.checkpoint.save", refuse)
    with pytest.raises(UserError) as error:
        run(tmp_path / "out", None)
    assert str(error.value).splitlines()[0].startswith(f"the last checkpoint could not be saved: {os.strerror(number)}")
    assert f"{words}: train resume={tmp_path / 'out'}" in str(error.value)


@pytest.mark.parametrize(
    ("kind", "first", "words"),
    [
        ("divergence", None, ["half the learning rate", "To continue from step-00000004:"]),
        ("corruption", 5, ["To continue from step-00000004:"]),
        ("corruption", 3, ["Do not trust step-00000004: the fault may have begun at step 3.", "from scratch"]),
    ],
)
def test_advice_after_a_stop_depends_on_the_verdict(tmp_path, capsys, kind, first, words):
    class Stops(Scripted):
        def observe(self, record) -> Iterable[Verdict]:
            if record.step == 5:
                details = {} if first is None else {"first": first}
                yield Verdict(kind, "rank 1", 1.0, "a bit", Action.STOP, details=details)

    assert run(tmp_path / "out", Stops({})) == 3
    printed = capsys.readouterr().err.partition("the run stopped.")[2].splitlines()[2:]
    assert len(printed) == len(words)
    assert all(word in line for word, line in zip(words, printed, strict=True))


def one_weight_is_nan(run_dir, *settings: str) -> str:
    """Write a NaN on the last rank after the last update of the run, and return the error message."""
    s = open_session(run_dir, "run.steps=8", *settings)
    update = s.optimizer.step

    def breaks(learning_rate: float) -> None:
        update(learning_rate)
        if s.step == 7 and s.comms.rank == s.comms.world.size - 1:
            s.runtime.parameters()[0].pieces[0].tensor.data.view(-1)[0] = float("nan")

    s.optimizer.step = breaks
    with pytest.raises(UserError) as refused:
        train(s)
    return str(refused.value)


def test_rank_0_decides_the_response(tmp_path):
    assert get_pool(2).run(of_two_minds, tmp_path / "out") == [[0, 2], [0, 2]]


def rolled_back_on_ranks(run_dir) -> list:
    s = open_session(run_dir, "run.steps=6", "parallel=ddp")
    back = Response(Action.ROLL_BACK, ("spike",))
    seen = ({5: Action.WARN}, {3: Action.SKIP}) if s.comms.rank == 1 else ({}, {})  # only rank 1 returns verdicts
    s.health["asked"] = Asked(seen[0], back, before=seen[1])
    code = train(s)
    return [code, s.step, s.cursor, s.attempt, s.history]


def test_verdict_of_one_rank_applies_to_all(tmp_path):
    first, second = get_pool(2).run(rolled_back_on_ranks, tmp_path / "out")
    assert first == second
    assert first[:4] == [0, 6, 7 * G, 2]
    records = read_records(tmp_path / "out" / "metrics.jsonl")
    assert [bool(record["skipped"]) for record in records] == [False, False, True, False, False, False]


class Once(Scripted):
    """Scripted health check that returns verdicts only in the first attempt."""

    def observe(self, record) -> Iterable[Verdict]:
        return super().observe(record) if record.attempt == 1 else ()


def test_response_counts_once_when_checkpoint_is_damaged(tmp_path):
    """Load a damaged newest checkpoint: the attempts.jsonl line of the second try replaces that of the first."""
    out = tmp_path / "out"
    s = open_session(out, "run.steps=8")
    back = Response(Action.ROLL_BACK, ("spike",), skip=8, rate=0.5, rate_steps=100)
    s.health["scripted"] = Once({5: Action.STOP}, back)
    load, tried = s.checkpointer.load, []

    def once_damaged(id, *rest):
        tried.append(str(id))
        if len(tried) == 1:
            raise BadCheckpoint("model/x", None, "a file")
        return load(id, *rest)

    s.checkpointer.load = once_damaged
    assert train(s) == 0
    assert tried == ["step-00000004", "step-00000002"]
    (line,) = read_responses(out)
    assert (line.attempt, line.instead, line.start) == (3, 2, "step-00000002")
    assert (line.skipped_from, line.skipped) == (2 * G, 8)
    rates = {record["step"]: record["learning_rate"] for record in read_records(out / "metrics.jsonl")}
    assert rates[8] == rates[1] / 2
    assert s.saved != "step-00000004"


def test_unserializable_verdict_is_reported_as_check_failure(tmp_path):
    class Unspeakable(Scripted):
        def observe(self, record) -> Iterable[Verdict]:
            yield Verdict("odd", "here", 1.0, "1", Action.STOP, details={"norm": object()})

    s = open_session(tmp_path / "out", "run.steps=2")
    told: list[str] = []
    s.health["scripted"] = Unspeakable({})
    s.reporter.note = told.append
    assert train(s) == 0
    assert "health=scripted failed: TypeError" in " ".join(told)


class Fails(Scripted):
    """Health check that raises an error only on rank 1: in `attach` if it has a budget, otherwise in `observe`."""

    def attach(self, runtime, optimizer, comms, store, device) -> None:
        if self.budget and comms.rank == 1:
            raise OSError("no such driver")
        self.rank = comms.rank

    def observe(self, record) -> Iterable[Verdict]:
        if self.rank == 1:
            raise OSError("no such driver")
        return ()


def failing_on_rank_1(run_dir, where: str) -> list:
    s = open_session(run_dir, "run.steps=3", "parallel=ddp")
    s.health["scripted"] = Fails({}, budget=int(where == "attach"))
    attach(s)
    return [train(s), sorted(s.health)]


@pytest.mark.parametrize("where", ["attach", "observe"])
def test_check_error_on_other_rank_is_reported(tmp_path, where):
    """Report an error of one rank once, and remove the check on all ranks if one rank could not attach it."""
    one, other = get_pool(2).run(failing_on_rank_1, tmp_path / "out", where)
    assert one == other == [0, [] if where == "attach" else ["scripted"]]
    found = [line for line in events.read_events(tmp_path / "out") if line["event"] == "verdict"]
    told = [(line["kind"], line["where"], line["evidence"]) for line in found]
    wanted = [("check-failed", "rank 1", "health=scripted failed: OSError: no such driver")]
    assert told == (wanted if where == "observe" else []), "once, not in every step"


def member_in_pulse(run_dir) -> str:
    (path,) = memory.list_pulses(run_dir)
    return path.read_bytes()[8 * layout.MEMBER : 8 * layout.WORDS].rstrip(b"\0").decode()


class Looks(Scripted):
    """Health check that reads the active member from the pulse of its rank, as an outside observer does."""

    def observe(self, record):
        self.seen = member_in_pulse(self.run_dir)
        return ()


def test_pulse_names_the_active_check(tmp_path):
    before = write.get_current()
    try:
        write.use(write.Pulse.open(tmp_path, 0, 1, 0, os.getpid()))
        s = open_session(tmp_path / "out", "run.steps=1")
        check = Looks({})
        check.run_dir = tmp_path
        s.health["scripted"] = check
        assert train(s) == 0
        assert check.seen == "health/scripted"
        assert member_in_pulse(tmp_path) == ""
    finally:
        write.use(before)
        memory.remove(os.getpid())


def test_full_disk_for_events_does_not_end_run(tmp_path):
    s = open_session(tmp_path / "out", "run.steps=2")
    told: list[str] = []
    s.reporter.note = told.append
    s.events._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
    assert train(s) == 0
    assert "cannot write a line to events.jsonl: No space left on device" in " ".join(told)


# --- decisions ---


class Overriding(Scripted):
    def observe(self, record) -> Iterable[Verdict]:
        for verdict in super().observe(record):
            yield verdict
            yield Verdict("spike", verdict.where, 1.0, "harmless", Action.NOTE, ("spike",))


def test_notes_name_the_action_taken_once(tmp_path):
    """Print a verdict with the action of the response, not with its suggestion, and no overridden verdict."""
    for check, lines in (
        (Scripted({3: Action.STOP}, Response(Action.WARN, ("spike",))), ["warn: spike at step 3: loss"]),
        (Overriding({3: Action.STOP}), ["note: spike at step 3: harmless"]),
    ):
        s = open_session(tmp_path / check.__class__.__name__, "run.steps=4")
        s.health["scripted"] = check
        notes: list[str] = []
        s.reporter.note = notes.append  # type: ignore[method-assign]
        assert train(s) == 0
        said = [note for note in notes if "spike" in note]
        assert len(said) == len(lines)
        assert all(note.startswith(line) for note, line in zip(said, lines, strict=True))


def found(kind: str, suggestion: Action, *overrides: str) -> Verdict:
    return Verdict(kind, "here", 1.0, "1", suggestion, overrides)


@pytest.mark.parametrize(
    ("verdicts", "responses", "action", "kinds"),
    [
        ([], [], Action.NOTE, ()),
        ([found("a", Action.WARN), found("b", Action.STOP)], [], Action.STOP, ("b",)),
        ([found("a", Action.STOP), found("b", Action.SKIP, "a")], [], Action.SKIP, ("b",)),
        ([found("a", Action.STOP), found("a", Action.SKIP, "a")], [], Action.SKIP, ("a",)),
        ([found("a", Action.STOP)], [Response(Action.ROLL_BACK, ("a",))], Action.ROLL_BACK, ("a",)),
        ([found("a", Action.STOP), found("b", Action.WARN)], [Response(Action.NOTE, ("b",))], Action.STOP, ("a",)),
        (
            [found("a", Action.STOP)],
            [Response(Action.SKIP, ("a",)), Response(Action.RESTART, ("a",))],
            Action.RESTART,
            ("a",),
        ),
    ],
)
def test_strongest_response_or_unanswered_suggestion_wins(verdicts, responses, action, kinds):
    response = decide(Agreed(tuple(verdicts)), responses)
    assert (response.action, response.kinds) == (action, kinds)


def test_learning_rate_reduction_survives_stronger_response():
    cut = Response(Action.NOTE, ("a",), rate=0.1, rate_steps=5, exclude=("x",))
    response = decide(Agreed((found("b", Action.WARN),)), [cut])
    assert (response.action, response.rate, response.rate_steps, response.exclude) == (Action.WARN, 0.1, 5, ("x",))
    assert response.changes_course


@pytest.mark.parametrize(
    ("cursor", "expected"), [(0, 0), (92, 92), (93, 140), (100, 140), (139, 140), (140, 140), (200, 200), (193, 260)]
)
def test_cursor_moves_past_skipped_samples(cursor, expected):
    lines = [Attempt(2, "x", 40, skipped_from=100), Attempt(3, "y", 20, skipped_from=120), Attempt(4, "z")]
    lines += [Attempt(5, "w", 60, skipped_from=200)] if cursor == 193 else []
    assert attempts.find_next_cursor(lines, cursor, lambda _: 8) == expected


@pytest.mark.parametrize("wrong", [{"skip": -1}, {"rate": float("nan")}, {"rate": -0.5}])
def test_invalid_response_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be .*at least 0, not "):
        Response(Action.ROLL_BACK, ("a",), **wrong)


# --- train command ---

GOES_BACK = """
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.health import Action, HealthCheck, Response, Verdict
from gangline.config.schema import HealthConfig


@dataclass
class GoesBack(HealthConfig):
    pass


class GoesBackCheck(HealthCheck):
    def __init__(self, config, run):
        pass

    def observe(self, record):
        if (record.attempt, record.step) == (1, 5):
            yield Verdict("spike", "step 5", 1.0, "loss 9", Action.ROLL_BACK)
        if (record.attempt, record.step) == (2, 8):
            yield Verdict("bad-link", "rank 0", 1.0, "1 of 8", Action.STOP)

    def respond(self, agreed, record):
        if agreed.select("bad-link"):
            again = len(agreed.list_responses("bad-link", Action.RESTART))
            return Response(Action.WARN if again else Action.RESTART, ("bad-link",))


@hookimpl
def gangline_health_checks():
    yield Part(name="goes-back", config=GoesBack, build="goes_back:GoesBackCheck", summary="Goes back")
"""


def test_run_survives_rollback_restart_and_kill(runs, strangers):
    strangers.add("gangline-goes-back", GOES_BACK, module="goes_back")
    runs.environment |= strangers.environment
    words = ("health=[goes-back]", "run.steps=100", "checkpoint.every=2", "launch.max_restarts=1")
    killed = runs.fork("run.dir=out", *words)
    runs.wait_for_step(killed, "out", 12)
    kill(killed)
    runs.train("resume=out")
    lines = read_responses(runs.directory / "out")
    assert [(line.action, line.kinds, line.attempt) for line in lines] == [
        ("roll_back", ("spike",), 2),
        ("restart", ("bad-link",), 2),
    ]
    assert [record["step"] for record in runs.read_records("out")] == list(range(1, 101))
    checkpointer = DcpCheckpointer(str(runs.directory / "out"))
    assert checkpointer.read_document(checkpointer.find_latest())["cursor"] == 101 * 4, (
        "the samples of one step were passed over"
    )
    told = events.read_events(runs.directory / "out")
    assert [line["why"] for line in told if line["event"] == "end"] == ["restart", "done"]


RAISES = """
import os
import sys
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline.health import Action, HealthCheck, Verdict, run_within
from gangline.config.schema import HealthConfig


@dataclass
class Raises(HealthConfig):
    parts: bool = False
    asked: str = "does"  # what it does when it is asked to leave a part of it out


class RaisesCheck(HealthCheck):
    def __init__(self, config, run):
        self.left = ["first", "second"] if config.parts else []
        self.whole, self.asked = not config.parts, config.asked

    def attach(self, runtime, optimizer, comms, store, device):
        self.rank = comms.rank

    def leave_out(self, part):
        if self.asked == "refuses":
            return False
        if self.asked == "raises" or (self.asked == "raises on rank 1" and os.environ["RANK"] == "1"):
            raise KeyError(part)
        if self.asked == "exits":
            sys.exit(0)
        self.left.remove(part)
        return True

    def observe(self, record):
        yield Verdict("left", "the run", 1.0, " ".join(self.left), Action.NOTE)

    def collective(self, comm):
        if self.whole:
            raise OSError("no such driver")
        for part in self.left:
            with run_within(part):
                if part == "second":
                    raise OSError("no such driver") if self.asked != "exits" else SystemExit(0)


@hookimpl
def gangline_health_checks():
    yield Part(name="raises", config=Raises, build="raises:RaisesCheck", summary="Raises where all ranks wait")
"""


def test_check_failing_in_collective_is_disabled(runs, strangers):
    """Restart the job without the check, because no rank can continue alone after an error in a collective."""
    strangers.add("gangline-raises", RAISES, module="raises")
    runs.environment |= strangers.environment
    runs.train("run.dir=out", "health=[raises]", "run.steps=4", "launch.processes=1", "launch.max_restarts=2")
    told = events.read_events(runs.directory / "out")
    assert [line["member"] for line in told if line["event"] == "launch"] == ["", "health/raises"]
    (failed,) = [line for line in told if line["event"] == "verdict"]
    wanted = "is disabled until the job ends or its code changes: rank 0 failed first: OSError: no such driver"
    assert failed["kind"] == "check-failed"
    assert failed["evidence"].startswith(f"health=raises {wanted}")
    assert [record["step"] for record in runs.read_records("out")] == [1, 2, 3, 4]


ALONE = "; the check could not disable only second: health=raises failed: "


@pytest.mark.parametrize(
    ("asked", "said", "why"),
    [
        ("does", "health=raises/second", ""),
        pytest.param("refuses", "health=raises", "", marks=pytest.mark.nightly),
        pytest.param("raises", "health=raises", f"{ALONE}KeyError: 'second'", marks=pytest.mark.nightly),
        ("raises on rank 1", "health=raises", f"{ALONE}KeyError: 'second'"),
        pytest.param("exits", "health=raises", f"{ALONE}SystemExit: 0", marks=pytest.mark.nightly),
    ],
)
def test_only_failing_part_of_check_is_disabled(runs, strangers, asked, said, why):
    """Remove the complete check on all ranks if one rank cannot leave out the failing part alone."""
    strangers.add("gangline-raises", RAISES, module="raises")
    runs.environment |= strangers.environment
    check = ("health=[raises]", "health.raises.parts=true", f"health.raises.asked={asked}")
    words = (*check, "launch.processes=2", "launch.max_restarts=2")
    runs.train("run.dir=out", "parallel=ddp", "run.steps=4", *words)
    told = events.read_events(runs.directory / "out")
    assert [line["member"] for line in told if line["event"] == "launch"] == ["", "health/raises/second"]
    found = {(line["kind"], line["evidence"]) for line in told if line["event"] == "verdict"}
    (failed,) = (evidence for kind, evidence in found if kind == "check-failed")
    assert failed.startswith(f"{said} is disabled until the job ends or its code changes: rank "), found
    assert why in failed
    assert {evidence for kind, evidence in found if kind == "left"} == ({"first"} if asked == "does" else set())
    assert [record["step"] for record in runs.read_records("out")] == [1, 2, 3, 4]


def test_failed_check_stays_disabled_until_code_changes(runs, strangers):
    """Resume as a queue would: each start would fail again. Other options or changed code run the check again."""
    strangers.add("gangline-raises", RAISES, module="raises")
    runs.environment |= strangers.environment
    runs.train("run.dir=out", "health=[raises]", "run.steps=4", "launch.processes=1", code=1)
    runs.train("resume=out")
    told = events.read_events(runs.directory / "out")
    assert [line["after"] for line in told if line["event"] == "launch"] == ["", "bug"]
    (failed,) = [line for line in told if line["event"] == "verdict"]
    assert failed["evidence"].startswith("health=raises is disabled until the job ends or its code changes: rank 0")
    assert "raises where" not in runs.train("resume=out", "run.steps=6", code=1), "another run is asked anew"
    assert [line["after"] for line in events.read_events(runs.directory / "out") if line["event"] == "launch"][2:] == [
        ""
    ]
    (strangers.site / "raises.py").write_text(RAISES.replace('raise OSError("no such driver")', "return", 1))
    runs.train("resume=out")
    told = events.read_events(runs.directory / "out")
    assert [line["after"] for line in told if line["event"] == "launch"][3:] == ["bug"]
    assert {line["kind"] for line in told if line["event"] == "verdict"} == {"check-failed", "left"}, (
        "core tries again in each step"
    )
