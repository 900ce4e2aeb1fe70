"""`gangline runs` and `gangline compare` on live, ended, killed, damaged and incomplete runs."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from gangline.config.compose import compose
from gangline.config.defaults import build_default_run
from gangline.errors import UserError
from gangline.record import StepRecord
from gangline.run.directory import RunDirectory
from gangline.run.ending import RunEnding, write_ending
from gangline.run.events import Events
from gangline.run.generation import STEP
from gangline.run.lock import RunLock
from gangline.train.left_behind import draw_figure
from gangline_basics.runs import run_figure
from gangline_basics.runs.command import main as runs
from gangline_basics.runs.compare import draw_picture, find_differences, main as compare
from gangline_basics.runs.listing import read_summaries, read_summary
from gangline_basics.track.config import JsonLines
from gangline_testkit import RealRuns
from gangline_testkit.figures import list_readable, list_words


def record(step: int, loss: float, **more) -> StepRecord:
    seconds = {"time": 1e9 + 3600 * step, "step_seconds": 3600.0}
    return StepRecord(step, 1, loss, 0.5, 1e-3, 100, 12345.6, None, **(seconds | more))


def made(
    directory: Path, *words: str, losses: tuple[float, ...] = (3.0, 2.0, 1.0), reason: str | None = "done"
) -> Path:
    """Create a run directory as `train` leaves it, and return its path."""
    (run,) = compose(["recipe=tiny", f"run.dir={directory}", "run.steps=10", *words])
    RunDirectory.create(run).unlock()
    events = Events(directory, 1)
    if losses:
        events.write("start", processes=1)
        lines = [record(i + 1, loss).to_json() for i, loss in enumerate(losses)]
        (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    if losses and reason:
        events.write("end", why=reason, evidence="its evidence")
        write_ending(directory, RunEnding(generation=1, reason=reason, exit_code=0, evidence=f"about {reason}"))
    events.close()
    return directory


def table(capsys, *words: str) -> dict[str, dict]:
    assert runs([*words, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {Path(line["directory"]).name: line for line in lines}


def test_runs_table_distinguishes_each_state(tmp_path: Path, capsys) -> None:
    for reason in ("done", "verdict", "preempted", "signal", "bug", "mistake"):
        made(tmp_path / reason, reason=reason)
    made(tmp_path / "lost", reason=None)
    made(tmp_path / "fresh", losses=())
    (tmp_path / "sweep").mkdir()
    made(tmp_path / "sweep" / "inner")
    damaged = made(tmp_path / "cut")
    text = (damaged / "config.yaml").read_text()
    (damaged / "config.yaml").write_text(text[: len(text) // 2])
    (tmp_path / "gone" / "logs").mkdir(parents=True)
    (tmp_path / "gone" / "parts.json").write_text("{")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("not a run")
    found = table(capsys, str(tmp_path))
    states = {name: one["state"] for name, one in found.items()}
    assert states == {
        "done": "done", "verdict": "stopped", "preempted": "preempted", "signal": "signal", "bug": "failed",
        "mistake": "failed", "lost": "killed", "fresh": "new", "inner": "done", "cut": "damaged", "gone": "damaged",
    }  # fmt: skip
    assert found["done"] | {"time": 0, "directory": "", "name": ""} == {
        "name": "", "directory": "", "state": "done", "step": 3, "steps": 10, "loss": 1.0, "tokens_per_second": 12345.6,
        "words": "about done", "time": 0, "unreadable": 0,
    }  # fmt: skip
    assert "truncated" in found["cut"]["words"]
    assert runs([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"done\s+tiny\s+3/10\s+1\.0000\s+12\.3 k\s+done\s+about done", shown), shown
    assert runs([str(tmp_path), "--state", "damaged"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    with pytest.raises(SystemExit) as ended:
        runs([str(tmp_path), "--state", "finished"])
    assert ended.value.code == 2
    assert "preempted" in capsys.readouterr().err


def test_started_run_without_readable_events_is_damaged(tmp_path: Path, capsys) -> None:
    for name in ("noise", "empty", "absent", "untouched"):
        made(tmp_path / name, reason=None)
    (tmp_path / "noise" / "events.jsonl").write_bytes(b"\x00" * 300)
    (tmp_path / "empty" / "events.jsonl").write_bytes(b"")
    (tmp_path / "absent" / "events.jsonl").unlink()
    made(tmp_path / "early", losses=())
    (tmp_path / "early" / "attempts.jsonl").write_text("{}\n")
    made(tmp_path / "launched", losses=())
    (tmp_path / "launched" / "events.jsonl").write_text("noise\n")
    made(tmp_path / "fresh", losses=())
    found = table(capsys, str(tmp_path))
    assert found["untouched"]["state"] == "killed"
    assert found["fresh"]["state"] == "new"
    words = "and no ending was recorded: the run was started; its end is not known"
    for name, fault in [("noise", "damaged"), ("launched", "damaged")]:
        assert (found[name]["state"], found[name]["words"]) == ("damaged", f"events.jsonl is {fault}, {words}")
    for name in ("empty", "absent", "early"):
        assert (found[name]["state"], found[name]["words"]) == ("damaged", f"events.jsonl is missing or empty, {words}")
    assert (found["noise"]["step"], found["noise"]["loss"]) == (3, 1.0)


def test_a_long_message_alone_is_shortened(tmp_path: Path, capsys) -> None:
    run = made(tmp_path / "a-run-with-a-name", "run.name=the-name")
    write_ending(run, RunEnding(generation=1, reason="failed", exit_code=1, evidence="rank 1 is slow; " * 30))
    assert runs([str(tmp_path)]) == 0
    _, line = capsys.readouterr().out.splitlines()
    assert line.split()[:7] == ["a-run-with-a-name", "the-name", "3/10", "1.0000", "12.3", "k", "failed"]
    assert line.endswith("…")
    assert len(line) == 200  # if the output is not a terminal


@pytest.mark.parametrize("name", ["config.yaml", "events.jsonl", "ending.json", "metrics.jsonl"])
def test_named_pipe_does_not_hide_other_runs(tmp_path: Path, capsys, name: str) -> None:
    for each in ("good", "bad"):
        made(tmp_path / each)
    (tmp_path / "bad" / name).unlink()
    os.mkfifo(tmp_path / "bad" / name)
    found = table(capsys, str(tmp_path))
    assert found["good"]["state"] == "done"
    assert (found["bad"]["state"], found["bad"]["words"]) == (
        "damaged",
        f"{tmp_path / 'bad' / name} is a named pipe, not a regular file.",
    )


def test_wrong_value_types_do_not_hide_other_runs(tmp_path: Path, capsys) -> None:
    places = {"metrics.jsonl": ("loss", "tokens_per_second", "notes"), "ending.json": ("reason", "evidence")}
    good, bad = made(tmp_path / "good"), made(tmp_path / "bad")
    for file, keys in places.items():
        lines = (good / file).read_text()
        content = json.loads(lines if file == "ending.json" else lines.splitlines()[-1])
        for key, value in itertools.product(keys, (5, 10**400, [1], {"a": 1})):
            (bad / file).write_text(json.dumps({**content, key: value}) + "\n")
            assert runs([str(tmp_path)]) == 0
            assert "good" in capsys.readouterr().out
            assert table(capsys, str(tmp_path))["good"]["state"] == "done"
        (bad / file).write_text(lines)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can look with the rights of another user")
def test_unreadable_run_does_not_hide_other_runs(capsys) -> None:
    with tempfile.TemporaryDirectory() as shared:  # other users cannot read directories of pytest
        Path(shared).chmod(0o755)
        for name in ("good", "private"):
            made(Path(shared, name))
        Path(shared, "private").chmod(0o700)
        os.seteuid(61001)
        try:
            found = table(capsys, shared)
        finally:
            os.seteuid(0)
    assert (found["good"]["state"], found["private"]["state"]) == ("done", "damaged")
    assert "private/config.yaml cannot be read: Permission denied" in found["private"]["words"]


@pytest.mark.parametrize("content", [b"\xff\n...\n", b"run: [1]\n...\n", b"a: 2001-99-99\n...\n"])
def test_run_with_invalid_config_is_shown_as_damaged(tmp_path: Path, capsys, content: bytes) -> None:
    made(tmp_path / "good")
    (made(tmp_path / "bad") / "config.yaml").write_bytes(content)
    found = table(capsys, str(tmp_path))
    assert (found["good"]["state"], found["bad"]["state"]) == ("done", "damaged")


def test_step_without_metrics_is_read_from_step_file(tmp_path: Path) -> None:
    run = made(tmp_path / "quiet")
    (run / "metrics.jsonl").unlink()
    (run / STEP).write_text(f"{3:20}")
    assert read_summary(run).step == 3


def test_live_run_is_running_then_preempted(tmp_path: Path) -> None:
    with RealRuns(tmp_path) as real:
        process = real.fork("run.dir=a", "run.steps=100000")
        real.wait_for_step(process, "a", 1)
        (found,) = read_summaries(tmp_path)
        assert found.step > 0
        assert found.state == "running"
        process.terminate()
        real.finish(process, code=75)
    assert read_summaries(tmp_path)[0].state == "preempted"


def test_remote_run_without_new_writes_is_silent(tmp_path: Path, monkeypatch) -> None:
    run = made(tmp_path / "a", reason=None)
    lines = (run / "events.jsonl").read_text().replace(os.uname().nodename, "elsewhere")
    (run / "events.jsonl").write_text(lines)
    assert read_summaries(tmp_path)[0].state == "running"
    for file in run.iterdir():
        os.utime(file, (1e9, 1e9))
    assert read_summaries(tmp_path)[0].state == "silent"


def test_newest_record_is_read_despite_truncated_last_line(tmp_path: Path) -> None:
    """Check a truncated last line after a record of a rollback that is longer than the block read first."""
    run = made(tmp_path / "a")
    with (run / "metrics.jsonl").open("a") as file:
        file.write(record(2, 7.5, metrics={"x": [0.1] * 50_000}).to_json() + "\n" + record(3, 9.0).to_json()[:40])
    assert (read_summaries(tmp_path)[0].step, read_summaries(tmp_path)[0].loss) == (2, 7.5)


def test_damaged_metric_lines_are_reported(tmp_path: Path, capsys) -> None:
    """Check damage between records, and in a file without records.

    A partial last line of a live run is not reported, nor a line torn by a kill whose step was repeated.
    """
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    for run in (one, two):
        with (run / "metrics.jsonl").open("a") as file:
            file.write(record(4, 0.5).to_json()[:40])
    assert runs([str(tmp_path)]) == compare([str(one), str(two)]) == 0
    assert capsys.readouterr().err == ""
    for run in (one, two):
        with (run / "metrics.jsonl").open("a") as file:
            file.write("\n" + record(4, 0.5).to_json() + "\n")
    assert runs([str(tmp_path)]) == compare([str(one), str(two)]) == 0
    assert capsys.readouterr().err == ""
    lines = [record(1, 3.0).to_json(), "garbage", "[1]", '{"step": "3"}', record(5, 2.0).to_json()]
    (one / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert runs([str(tmp_path)]) == compare([str(one), str(two)]) == 0
    told = capsys.readouterr().err.splitlines()
    words = f"note: {one / 'metrics.jsonl'} is damaged: 3 lines do not contain a step record, "
    words += "so the records of these steps are missing."
    assert told == [f"gangline runs: {words}", f"gangline compare: {words}"]
    (one / "metrics.jsonl").write_bytes(b"\0" * 100_000 + b"\n[[[[\n")
    assert read_summary(one).unreadable == 2
    with pytest.raises(UserError, match="The file contains no valid step record"):
        compare([str(one), str(two)])


def test_hundreds_of_runs_are_read_quickly(tmp_path: Path) -> None:
    first = made(tmp_path / "first")
    config, events = (first / "config.yaml").read_text(), (first / "events.jsonl").read_text()
    long = "".join(record(step, 1.0).to_json() + "\n" for step in range(1, 5000))
    for number in range(300):
        run = tmp_path / f"run{number}"
        run.mkdir()
        (run / "config.yaml").write_text(config)
        (run / "events.jsonl").write_text(events)
        (run / "metrics.jsonl").write_text(long if number < 20 else long[:50_000])
    start = time.process_time()
    assert len(read_summaries(tmp_path)) == 301
    assert time.process_time() - start < 15  # CPU seconds; about 3 on a quiet machine


def test_runs_and_compare_do_not_import_torch(tmp_path: Path) -> None:
    run = made(tmp_path / "a")
    code = f"""
import sys
from gangline.cli.main import main
assert main(["runs", {str(tmp_path)!r}]) == 0
assert main(["compare", {str(run)!r}, {str(run)!r}]) == 0
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"the directory .* does not exist"):
        runs([str(tmp_path / "none")])


def test_compare_shows_options_and_curves(tmp_path: Path, capsys) -> None:
    one = made(tmp_path / "one", losses=(3.0, 2.0, 1.0))
    two = made(tmp_path / "two", "optimizer.learning_rate=0.5", "schedule=wsd", losses=(3.5, float("nan")))
    assert compare([str(one), str(two)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"optimizer\.learning_rate\s+\S+\s+0\.5", shown), shown
    assert re.search(r"schedule\s+cosine\s+wsd", shown), shown
    assert re.search(r"^1\s+3\.0000\s+3\.5000$", shown, re.MULTILINE), shown
    assert re.search(r"^3\s+1\.0000\s*$", shown, re.MULTILINE), shown  # the second run has no step 3
    assert re.search(r"^best\s+1\.0000\s+3\.5000$", shown, re.MULTILINE), shown
    assert "run.dir" not in shown


def test_compare_over_tokens_and_hours_as_json(tmp_path: Path, capsys) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    for over, places in (("tokens", [100, 200, 300]), ("hours", [1, 2, 3])):
        assert compare([str(one), str(two), "--over", over, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["options"] == {}
        assert [[x for x, _ in curve] for curve in found["loss"]] == [places, places]


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_compare_writes_figure_file(tmp_path: Path, kind: str) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two", losses=(3.0, float("nan"), 2.0, 1.5), reason=None)
    file = tmp_path / f"curves.{kind}"
    assert compare([str(one), str(two), "--picture", str(file)]) == 0
    if kind == "svg":
        words = list_words(file.read_text())
        assert words[:5] == [*"1234", "step"]
        assert words[-4:] == ["loss", "one", "two", "loss of one, two"]
        assert {"1.00", "3.00"} <= set(words[5:-4]), "the vertical axis"
    else:
        from PIL import Image

        colours = {colour for _, colour in Image.open(file).convert("RGB").getcolors(100_000)}
        assert {(0, 0x72, 0xB2), (0xD5, 0x5E, 0)} <= colours


def test_figure_of_two_runs_shows_gap_for_nan() -> None:
    curves = [[(1.0, 3.0), (2.0, 2.0)], [(1.0, 3.0), (2.0, math.nan), (3.0, math.inf), (4.0, 1.5)]]
    figure = draw_picture(["one", "two"], curves, "loss", "hours")
    lines = figure.axes[0].get_lines()
    assert [line.get_label() for line in lines] == ["one", "two"]
    assert [[*line.get_xdata()] for line in lines] == [[1, 2], [1, 2, 3, 4]]
    assert str([[*map(float, line.get_ydata())] for line in lines]) == "[[3.0, 2.0], [3.0, nan, nan, 1.5]]"
    assert list_readable(figure)[0] == "loss of one, two"
    assert {"hours", "loss", "one", "two"} <= set(list_readable(figure))


def test_figure_of_many_runs_is_readable() -> None:
    names = [f"runs/{'a-long-name-' * (1 + number % 5)}{number}" for number in range(20)]
    figure = draw_picture(names, [[(1e9, 3.0 + number), (2e9, 2.0)] for number in range(20)], "loss", "tokens")
    assert "".join(list_readable(figure)).count("runs/") == 2 * 20
    assert len({(line.get_color(), line.get_linestyle()) for line in figure.axes[0].get_lines()}) == 20


def test_figure_without_steps_shows_message() -> None:
    assert list_readable(draw_picture(["one"], [[]], "loss", "step"))[1] == "The runs have no steps yet."


def test_compare_draws_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "one")
    lines = [record(step, 3.0 - step / 10, validation_loss=3.0 if step % 2 else None) for step in range(1, 6)]
    (run / "metrics.jsonl").write_text("".join(line.to_json() + "\n" for line in lines))
    file = tmp_path / "one.svg"
    assert compare([str(run), "--picture", str(file)]) == 0
    said = capsys.readouterr().out
    assert "The configurations" not in said
    assert "best" in said
    words = list_readable(run_figure.run_figure(run))
    assert words[0] == "Loss of one"
    assert {"training", "validation", "learning rate", "loss (nats)", "step", "2.6"} <= set(words)
    assert sorted(list_words(file.read_text())) == sorted(words)
    assert compare([str(run), "--metric", "grad_norm", "--picture", str(file)]) == 0
    assert "learning rate" not in list_words(file.read_text())


def test_missing_matplotlib_at_run_end_is_reported(tmp_path, monkeypatch, capsys) -> None:
    session = SimpleNamespace(
        comms=SimpleNamespace(rank=0),
        step=3,
        directory=SimpleNamespace(path=made(tmp_path / "a")),
        run=build_default_run(),
    )
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert draw_figure(session) == ""
    said = 'train: cannot plot the loss: figures need matplotlib. pip install "gangline-basics[pictures]"\n'
    assert capsys.readouterr().err == said
    monkeypatch.undo()
    assert draw_figure(session) == str(tmp_path / "a" / "loss.svg")
    assert capsys.readouterr().err == ""


def test_run_with_figure_false_ends_without_figure(tmp_path: Path) -> None:
    run = build_default_run(track=[JsonLines(figure=False)])
    session = SimpleNamespace(
        comms=SimpleNamespace(rank=0), step=3, directory=SimpleNamespace(path=made(tmp_path / "a")), run=run
    )
    assert draw_figure(session) == ""
    assert not (tmp_path / "a" / "loss.svg").exists()


def test_figure_of_long_run_averages_points() -> None:
    curve = [(float(step), math.nan if step == 7 else step % 2) for step in range(1, 5001)]
    thinned = run_figure.thin(curve)
    assert len(thinned) == run_figure.POINTS
    assert thinned[-1] == (5000.0, 0.4)
    assert thinned[1] == (10.0, 0.25)


def test_compare_refuses_unknown_metric_run_or_extension(tmp_path: Path) -> None:
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    with pytest.raises(UserError, match=r"the metric 'los' is missing in all steps of"):
        compare([str(one), str(two), "--metric", "los"])
    with pytest.raises(UserError, match="there is no run directory"):
        compare([str(one), str(tmp_path / "none")])
    with pytest.raises(UserError, match=r"\.svg or \.png"):
        compare([str(one), str(two), "--picture", "curves.gif"])


def test_differences_list_changed_parts_and_options() -> None:
    one = {"parts": {"optimizer": "adamw"}, "optimizer": {"eps": 1e-8}, "run": {"dir": "a", "seed": 1}}
    two = {"parts": {"optimizer": "muon"}, "optimizer": {"eps": 1e-8, "momentum": 0.9}, "run": {"dir": "b", "seed": 1}}
    assert find_differences([one, two]) == {"optimizer": ["adamw", "muon"], "optimizer.momentum": [None, 0.9]}
    one, two = ({"parts": {"precision": name}, "precision": {}, "batch": {"ramp": {}}} for name in ("fp32", "bf16"))
    assert find_differences([one, two]) == {"precision": ["fp32", "bf16"]}


def test_compare_reports_unreadable_and_unwritable_files(tmp_path: Path) -> None:
    phases = {"collective": [0.1, 0.2]}
    one, two = made(tmp_path / "one"), made(tmp_path / "two")
    file = one / "metrics.jsonl"
    file.write_text(record(1, 2.0, rank_phases=phases).to_json() + "\n")
    with pytest.raises(UserError, match="is a list of numbers") as refused:
        compare([str(one), str(two), "--metric", "rank_phases/collective"])
    assert "rank_phases" not in "".join(refused.value.details)
    with pytest.raises(UserError, match="cannot be written"):
        compare([str(one), str(two), "--picture", str(tmp_path / "none" / "x.svg")])
    file.write_text('{"step": 1, "loss": 2.0}\n')
    with pytest.raises(UserError, match="another version"):
        compare([str(one), str(two)])
    file.write_bytes(record(1, 2.0).to_json().encode()[:-1] + b', "notes": ["\xff"]}\n')
    with pytest.raises(UserError, match="is damaged"):
        compare([str(one), str(two)])


def test_run_lock_is_found_under_another_device_number(tmp_path: Path, monkeypatch) -> None:
    """Check another device number, as on btrfs and overlayfs; without the open file, an equal inode does not count."""
    run = made(tmp_path / "a", reason=None)
    lock, locks = RunLock(run), tmp_path / "locks"
    monkeypatch.setattr("gangline_basics.runs.held.LOCKS", locks)
    line = "7: FLOCK  ADVISORY  WRITE {pid} ff:1e:{inode} 0 EOF\n"
    lock.take()
    locks.write_text(line.format(pid=os.getpid(), inode=(run / ".lock").stat().st_ino))
    assert read_summaries(tmp_path)[0].state == "running"
    lock.release()
    assert read_summaries(tmp_path)[0].state == "killed"
