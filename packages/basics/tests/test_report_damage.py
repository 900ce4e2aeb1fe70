"""`gangline report` of a run with damaged files: each damage is named, and no number hides it."""

from __future__ import annotations

import json
import random
import warnings
from pathlib import Path

import pytest
from report_pages import QUICK, copy, read_lines, write_lines, write_report

from gangline.errors import UserError
from gangline.run.attempts import refuse_damage
from gangline_basics.runs.report.command import main as report
from gangline_testkit import RealRuns


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run of 20 steps with checkpoints at steps 10 and 20, which only the tests that copy it may change."""
    directory = tmp_path_factory.mktemp("quick")
    with RealRuns(directory, settings=()) as runs:
        runs.train("run.dir=done", *QUICK, "checkpoint.every=10")
    return directory / "done"


def replace_line(run: Path, name: str, number: int, text: str) -> None:
    lines = (run / name).read_text().splitlines()
    (run / name).write_text("\n".join([*lines[:number], text, *lines[number + 1 :]]) + "\n")


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_random_bytes_as_events_are_damage(done: Path, tmp_path: Path, end: bytes) -> None:
    run = copy(done, tmp_path / "a")
    (run / "events.jsonl").write_bytes(random.Random(0).randbytes(3000).replace(b"\n", b"") + end)
    page = write_report(run)
    assert "1 damaged line in events.jsonl." in page.notes
    assert not any("missing or empty" in note for note in page.notes)
    assert page.facts["goodput"] == "not known"


@pytest.mark.parametrize(
    "line", ["[]", "7", "{}", '{"event": "verdict"}', '{"event": 3, "time": "x"}', '{"event": "st']
)
def test_event_lines_that_are_not_events_are_counted(done: Path, tmp_path: Path, line: str) -> None:
    run = copy(done, tmp_path / "a")
    for number in (1, 2):
        replace_line(run, "events.jsonl", number, line)
    page = write_report(run)
    assert "2 damaged lines in events.jsonl." in page.notes
    assert page.facts["goodput"] == "not known"
    assert "None" not in " ".join(page.notes)


def test_truncated_last_event_is_no_damage(done: Path, tmp_path: Path) -> None:
    run = copy(done, tmp_path / "a")
    path = run / "events.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    page = write_report(run)
    assert not any("damaged" in note for note in page.notes)
    assert page.facts["goodput"] == write_report(done).facts["goodput"]


@pytest.mark.parametrize(
    "change",
    [
        {"loss": "much"},
        {"loss": None},
        {"step": -3},
        {"step": 10**9},
        {"step": 10**400},
        {"step": 3},
        {"step": True},
        {"tokens": "x"},
        {"time": 1e300},
        {"seconds": 3},
        {"metrics": {"x": "many"}},
        {"notes": [4]},
        "step",
        "[]",
    ],
)
def test_invalid_records_are_counted(done: Path, tmp_path: Path, change: dict | str) -> None:
    run = copy(done, tmp_path / "a")
    record = read_lines(run)[6]
    if change == "step":
        del record["step"]
    text = change if change == "[]" else json.dumps({**record, **(change if isinstance(change, dict) else {})})
    replace_line(run, "metrics.jsonl", 6, text)
    page = write_report(run)
    assert any(
        note.startswith("1 record of metrics.jsonl was left out: not valid. First: line 7") for note in page.notes
    )
    tokens = sum(line["tokens"] for line in read_lines(done) if line["step"] != 7)
    assert page.facts["tokens"] == f"{tokens / 1000:.3g} k (incomplete)"
    assert page.find_row("loss")[1] == "19"
    assert page.facts["last step"] == "20 of 20"


def test_inserted_records_do_not_hide_the_others(done: Path, tmp_path: Path) -> None:
    run = copy(done, tmp_path / "a")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    wrong = [json.dumps({**json.loads(lines[0]), "step": step}) for step in (-5, 0, 5000)]
    (run / "metrics.jsonl").write_text("\n".join([*lines[:9], "[]", *wrong, *lines[9:], wrong[2]]) + "\n")
    page = write_report(run)
    assert any(note.startswith("5 records of metrics.jsonl were left out: not valid.") for note in page.notes)
    assert page.find_row("loss")[1] == "20"
    assert page.facts["last step"] == "20 of 20"


def test_metrics_without_valid_record_have_no_totals(done: Path, tmp_path: Path) -> None:
    run = copy(done, tmp_path / "a")
    write_lines(run, [{**line, "loss": "much"} for line in read_lines(run)])
    page = write_report(run)
    assert any(note.startswith("20 records of metrics.jsonl were left out: not valid.") for note in page.notes)
    assert "metrics.jsonl holds no valid step, so there are no curves." in page.notes
    assert (page.facts["tokens"], page.facts["last step"]) == ("not known", "not known")
    assert page.facts["goodput"] == "not known"


def test_damaged_attempts_are_named_without_command(done: Path, tmp_path: Path) -> None:
    run = copy(done, tmp_path / "a")
    (line,) = read_lines(run, "attempts.jsonl")
    write_lines(run, [{**line, "why": "other"}], "attempts.jsonl")
    with pytest.raises(UserError, match="checksum") as refused:
        refuse_damage(run)
    page = write_report(run)
    text = " ".join(page.notes)
    assert " ".join(str(refused.value).split()) in text
    assert "To continue" not in text
    (run / "attempts.jsonl").write_bytes(b"\xff\x00garbage\n\xfe")
    text = " ".join(write_report(run).notes)
    assert "2 damaged lines in attempts.jsonl." in text
    assert "To continue" not in text
    assert "holds no start of the run" not in text


def test_continue_command_adds_steps_to_the_checkpoint(done: Path, tmp_path: Path) -> None:
    run = copy(done, tmp_path / "a")
    write_lines(run, read_lines(run)[:5])
    assert f"To continue: train resume={run} run.steps=40" in write_report(run).notes
    ending = json.loads((run / "ending.json").read_text())
    (run / "ending.json").write_text(json.dumps({**ending, "reason": "bug"}))
    assert f"To continue: train resume={run} run.steps=40" in write_report(run).notes


def test_steps_of_a_resume_line_are_its_checkpoints(done: Path, tmp_path: Path) -> None:
    run = copy(done, tmp_path / "a")
    (first,) = read_lines(run, "attempts.jsonl")
    first.pop("sum")
    lines = [first, {**first, "start": "step-00000010", "why": "resume"}]
    write_lines(run, [*lines, {**first, "action": "restart", "why": "response"}], "attempts.jsonl")
    rows = [row for row in write_report(run).rows if len(row) == 5 and row[0] == "1"]
    assert [row[2] for row in rows] == ["0", "10", "not recorded"]


def test_directory_and_link_as_out_have_own_messages(done: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as refused:
        report([str(done), "--out", str(tmp_path)])
    assert str(refused.value).split("\n  ") == [f"{tmp_path} is a directory.", "Choose a file:  --out FILE"]
    (tmp_path / "link.html").symlink_to(tmp_path / "mine.html")
    with pytest.raises(UserError, match="is a symbolic link to") as refused:
        report([str(done), "--out", str(tmp_path / "link.html")])
    assert "--out FILE" in str(refused.value)
    assert "rm" not in str(refused.value).split("\n  ", 1)[1].split()
    assert "continued" not in str(refused.value)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize("values", [[1e308], [-1e308, 1e308], [1.7e308] * 20])
def test_huge_values_give_no_warning(done: Path, tmp_path: Path, name: str, values: list[float]) -> None:
    run = copy(done, tmp_path / "a")
    lines = read_lines(run)
    for line, value in zip(lines[4:], values, strict=False):
        line[name] = value
    write_lines(run, lines)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        page = write_report(run)
    assert not any("A file of the run is damaged" in note for note in page.notes)
    assert page.find_row(name)[1] == "20"
