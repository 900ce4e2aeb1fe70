"""attempts.jsonl: the attempts of a run, their start checkpoints, and abandoned branches."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, strategies as st

from gangline.checkpoint.id import CheckpointId
from gangline.errors import UserError
from gangline.run import attempts
from gangline.run.attempts import FILE, Attempt


def ids(*texts: str) -> list[CheckpointId]:
    found = [CheckpointId.parse(text) for text in texts]
    assert None not in found
    return found


def told(run_dir, *texts: str) -> list[str]:
    return [str(id) for id in attempts.branch(run_dir, ids(*texts))]


def test_attempt_lines_are_read_in_order(tmp_path):
    lines = [Attempt(1, None, time="2027-01-01"), Attempt(1, "step-00000010"), Attempt(2, "step-00000010", 32, "spike")]
    for line in lines:
        attempts.append(tmp_path, line)
    assert attempts.read(tmp_path) == lines
    assert attempts.read_current(tmp_path) == 2


def test_run_without_lines_is_in_attempt_1(tmp_path):
    assert attempts.read_current(tmp_path) == 1
    assert attempts.read(tmp_path) == []
    assert told(tmp_path, "step-00000010", "step-00000020") == ["step-00000020", "step-00000010"]
    assert attempts.find_latest(tmp_path, []) is None


@given(st.integers(1, 60))
def test_truncated_last_line_is_skipped(tmp_path_factory, cut):
    run_dir = tmp_path_factory.mktemp("run")
    attempts.append(run_dir, Attempt(1, None))
    attempts.append(run_dir, Attempt(2, "step-00000010"))
    path = run_dir / FILE
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) - cut])
    survivors = attempts.read(run_dir)
    assert survivors == [Attempt(1, None)] if cut > 2 else [Attempt(1, None), Attempt(2, "step-00000010")]
    attempts.refuse_damage(run_dir)
    attempts.append(run_dir, Attempt(3, "step-00000020"))
    assert attempts.read(run_dir) == [*survivors, Attempt(3, "step-00000020")]
    attempts.refuse_damage(run_dir)


def test_unknown_field_of_newer_release_is_ignored(tmp_path):
    (tmp_path / FILE).write_text('{"attempt": 2, "start": "step-00000010", "mood": "hopeful"}\n')
    assert attempts.read(tmp_path) == [Attempt(2, "step-00000010")]


def test_invalid_attempt_line_is_skipped(tmp_path):
    attempts.append(tmp_path, Attempt(1, None))
    lines = [b"\xff\xfe", b"[" * 100_000, b"{}", b"7", b'{"attempt": "2", "start": null}']
    lines += [b'{"attempt": 3, "start": null, "kinds": 5}', b'{"attempt": 3, "start": null, "rate": "x"}']
    lines += [b'{"attempt": 3, "start": 4}', b'{"attempt": null, "start": null}', b"\0" * 4096]
    with (tmp_path / FILE).open("ab") as file:
        file.write(b"\n".join(lines) + b"\n")
    attempts.append(tmp_path, Attempt(2, "step-00000004"))
    assert [line.attempt for line in attempts.read(tmp_path)] == [1, 2]
    assert told(tmp_path, "step-00000004", "step-00000008") == ["step-00000004"]


def test_resume_starts_from_newest_checkpoint(tmp_path):
    attempts.append(tmp_path, Attempt(1, None))
    attempts.append(tmp_path, Attempt(1, "step-00000010", why="resume"))
    assert told(tmp_path, "step-00000010", "step-00000020") == ["step-00000020", "step-00000010"]


def test_latest_after_rollback_skips_abandoned_branch(tmp_path):
    attempts.append(tmp_path, Attempt(1, None))
    attempts.append(tmp_path, Attempt(2, "step-00000010", why="loss spike"))
    old = ("step-00000005", "step-00000010", "step-00000020", "step-00000030")
    assert str(attempts.find_latest(tmp_path, ids(*old))) == "step-00000010", "nothing of its own yet: where it started"
    assert told(tmp_path, *old) == ["step-00000010", "step-00000005"]
    assert told(tmp_path, *old, "step-00000012.2") == ["step-00000012.2", "step-00000010", "step-00000005"]


def test_missing_start_checkpoint_falls_back_to_earlier_checkpoint(tmp_path):
    attempts.append(tmp_path, Attempt(2, "step-00000010"))
    assert told(tmp_path, "step-00000005", "step-00000020") == ["step-00000005"]
    assert attempts.find_latest(tmp_path, ids("step-00000020")) is None


def test_branch_follows_nested_rollbacks(tmp_path):
    attempts.append(tmp_path, Attempt(1, None))
    attempts.append(tmp_path, Attempt(2, "step-00000020"))
    attempts.append(tmp_path, Attempt(3, "step-00000030.2"))
    attempts.append(tmp_path, Attempt(4, "step-00000010"))  # rolls back past the start checkpoints of attempts 2 and 3
    known = ("step-00000010", "step-00000020", "step-00000030.2", "step-00000035.3")
    assert told(tmp_path, *known) == ["step-00000010"]
    attempts.append(tmp_path, Attempt(5, "step-00000035.3"))
    assert told(tmp_path, *known) == ["step-00000035.3", "step-00000030.2", "step-00000020", "step-00000010"]


def test_attempt_from_scratch_has_no_checkpoint(tmp_path):
    attempts.append(tmp_path, Attempt(1, None))
    attempts.append(tmp_path, Attempt(2, None, why="every checkpoint is damaged"))
    assert attempts.find_latest(tmp_path, ids("step-00000010")) is None


@pytest.mark.parametrize(
    "text",
    [
        "step-000000012",
        "step-00000012.1",
        "step-00000012.02",
        "step-0000001",
        "step-x",
        "step-00000010.",
        ".tmp-step-00000010",
        "step-00000010.2x",
    ],
)
def test_invalid_checkpoint_id_parses_to_none(text):
    assert CheckpointId.parse(text) is None


@given(st.integers(0, 10**10), st.integers(1, 1000))
def test_checkpoint_id_round_trips_and_sorts_by_step(step, attempt):
    id = CheckpointId(step, attempt)
    assert CheckpointId.parse(str(id)) == id
    assert id < CheckpointId(step + 1)


def test_failed_attempt_write_raises_error(tmp_path):
    """Raise the write error, because the load that a line records must not happen without the line."""
    code = (
        "import resource, signal, sys\n"
        "from gangline.run import attempts\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10, 10))\n"
        "attempts.append(sys.argv[1], attempts.Attempt(1, None))\n"
    )
    told = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert told.returncode == 1
    assert "File too large" in told.stderr
    assert os.path.getsize(tmp_path / FILE) <= 10
    assert attempts.read(tmp_path) == []


def test_response_of_repeated_step_is_not_counted():
    cut, stop = Attempt(1, "a", action="note", step=3, rate=0.5), Attempt(1, "a", action="restart", step=3)
    assert list(attempts.iterate_happened([cut, stop], 1, 3)) == [stop]
    assert list(attempts.iterate_happened([cut, stop], 1, 4)) == [cut, stop]
    assert list(attempts.iterate_happened([cut, stop], 2, 3)) == [cut, stop]


def test_attempt_line_round_trips_without_default_fields(tmp_path):
    line = Attempt(2, "a", 8, "loss 9", "now", 32, "roll_back", ("spike",), 5, 0.5, 4, 10, ("node-7",))
    attempts.append(tmp_path, Attempt(1, None))
    attempts.append(tmp_path, line)
    assert attempts.read(tmp_path) == [Attempt(1, None), line]
    first = (tmp_path / "attempts.jsonl").read_text().splitlines()[0]
    assert set(json.loads(first)) == {"attempt", "start", "skipped", "why", "time", "sum"}


def test_changed_byte_of_attempt_line_is_refused(tmp_path):
    response = {"action": "roll_back", "kinds": ("loss-spike",), "step": 14, "rate": 0.1, "rate_steps": 9}
    attempts.append(tmp_path, Attempt(1, None, time="2026-11-24T07:02:13+00:00"))
    attempts.append(tmp_path, Attempt(2, "step-00000010", 32, "loss 9", "2026-11-24T07:02:13+00:00", 80, **response))
    attempts.append(tmp_path, Attempt(2, "step-00000020.2", why="resume"))
    path = tmp_path / FILE
    whole, written = path.read_bytes(), attempts.read(tmp_path)
    attempts.refuse_damage(tmp_path)
    for place in range(len(whole)):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 2]) + whole[place + 1 :])
        if attempts.read(tmp_path) == written:  # the name of the checksum changed
            continue
        assert len(attempts.read(tmp_path)) < 3, whole[:place]
        with pytest.raises(UserError, match=r"is damaged in line \d: "):
            attempts.refuse_damage(tmp_path)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"attempt": 0}, "a number is out of range"),
        ({"attempt": 1}, "attempt 1 cannot start from 'step-00000010.2'"),
        ({"start": "step-10"}, "attempt 2 cannot start from 'step-10'"),
        ({"time": "2026-11-24T07:02:73+00:00"}, "the time '2026-11-24T07:02:73+00:00' is invalid"),
        ({"time": "2026-11-24T07:02:13"}, "the time '2026-11-24T07:02:13' is invalid"),
        ({"skipped": 99, "action": ""}, "99 samples are skipped without a rollback or a restart"),
        ({"skipped": -1}, "a number is out of range"),
        ({"rate": 1e999}, "a number is out of range"),
        ({"step": "4"}, "a field has the wrong type"),
    ],
)
def test_invalid_line_without_checksum_is_refused(tmp_path, changes, said):
    good = {"attempt": 2, "start": "step-00000010.2", "time": "2026-11-24T07:02:13+00:00", "action": "roll_back"}
    (tmp_path / FILE).write_text(json.dumps(good) + "\n" + '{"attempt": 3, "star')
    attempts.refuse_damage(tmp_path)
    (tmp_path / FILE).write_text(json.dumps({**good, **changes}) + "\n")
    with pytest.raises(UserError) as refused:
        attempts.refuse_damage(tmp_path)
    assert f"is damaged in line 1: {said}." in str(refused.value)
    assert f"sed -i 1d {tmp_path / FILE}" in str(refused.value)
