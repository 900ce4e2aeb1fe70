"""`track=jsonl`, `tensorboard`, `console`: records, kills, resumes, rollbacks, printed lines."""

from __future__ import annotations

import io
import json
import math
import re
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings, strategies as st
from rich.console import Console as Terminal
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gangline.record import StepRecord, read_records
from gangline.track import Start, Tracker
from gangline.train.report import Reporter
from gangline_basics.track.console import ConsoleTracker, format_duration, format_quantity
from gangline_basics.track.jsonl import JsonLinesTracker
from gangline_basics.track.tensorboard import TensorBoardTracker, make_histogram


def record(step: int, attempt: int = 1, **more) -> StepRecord:
    fields = {
        "loss": 1 / 3 + step,
        "grad_norm": 0.5,
        "learning_rate": 3e-3,
        "tokens": 2048,
        "tokens_per_second": 12345.6,
        "mfu": 0.321,
        "step_seconds": 0.2,
        "seconds": {"data": 0.001, "forward_backward": 0.15},
        "memory_bytes": 512 << 20,
    }
    return StepRecord(step=step, attempt=attempt, **(fields | more))


def start(directory: Path, first: int = 0, last: int = 100, attempt: int = 1) -> Start:
    describe = {"model": "6.1 M parameters", "data": "734 files"}
    return Start("tiny", str(directory), first, last, attempt, 6_100_000, 1, describe)


# --- metrics.jsonl ---------------------------------------------------------------------------------------------------


def lines(directory: Path) -> list[dict]:
    return read_records(directory / "metrics.jsonl")


def track(directory: Path, *records: StepRecord, first: int = 0) -> None:
    tracker = JsonLinesTracker(None)
    tracker.begin(start(directory, first))
    for one in records:
        tracker.record(one)
    tracker.end({})


def test_records_on_full_disk_are_written_later(tmp_path: Path) -> None:
    """Check that the tracker stays enabled, reports the failure once, and completes the truncated line."""
    reporter = Reporter({"jsonl": JsonLinesTracker(None)}, 0.0, 0, None, {})
    reporter.trackers["jsonl"].begin(start(tmp_path))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    reporter.record(record(1))
    resource.setrlimit(resource.RLIMIT_FSIZE, ((tmp_path / "metrics.jsonl").stat().st_size + 100, hard))
    try:
        reporter.record(record(2))
        reporter.record(record(3))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    reporter.record(record(4))
    reporter.end({})
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3, 4]
    assert [len(line["notes"]) for line in lines(tmp_path)] == [0, 0, 1, 0]
    assert "cannot write (File too large)" in lines(tmp_path)[2]["notes"][0]


def test_record_is_one_line_with_full_floats(tmp_path):
    track(tmp_path, record(1), record(2, loss=math.nan, finite=False, metrics={"blocks.0/load": [1.0, math.inf]}))
    first, second = lines(tmp_path)
    assert first["loss"] == 1 / 3 + 1
    assert first["seconds"] == {"data": 0.001, "forward_backward": 0.15}
    assert second["loss"] == "nan"
    assert second["metrics"] == {"blocks.0/load": [1.0, "inf"]}


def test_record_is_written_without_buffering(tmp_path):
    """Check that a record is in the file before `end`, so that a kill loses no record."""
    tracker = JsonLinesTracker(None)
    tracker.begin(start(tmp_path))
    tracker.record(record(1))
    assert [line["step"] for line in lines(tmp_path)] == [1]
    tracker.end({})


def test_after_a_resume_no_step_appears_twice(tmp_path):
    track(tmp_path, *map(record, range(1, 16)))
    track(tmp_path, *(record(step, loss=-step) for step in range(11, 14)), first=10)
    assert [(line["step"], line["loss"] < 0) for line in lines(tmp_path)] == [
        *((step, False) for step in range(1, 11)),
        *((step, True) for step in range(11, 14)),
    ]


def test_restart_from_scratch_drops_all_records(tmp_path):
    track(tmp_path, *map(record, range(1, 6)))
    track(tmp_path, record(1, loss=7.0))
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 7.0)]


def test_rollback_drops_later_records(tmp_path):
    track(tmp_path, *map(record, range(1, 9)), *(record(step, attempt=2) for step in range(6, 10)))
    assert [(line["step"], line["attempt"]) for line in lines(tmp_path)] == [
        *((step, 1) for step in range(1, 6)),
        *((step, 2) for step in range(6, 10)),
    ]


def test_metrics_file_is_append_only(tmp_path):
    path = tmp_path / "metrics.jsonl"
    track(tmp_path, *map(record, range(1, 9)))
    before = path.read_bytes() + b'{"step": 9, "lo'  # torn by a kill
    path.write_bytes(before)
    track(tmp_path, record(6, attempt=2), first=5)
    assert path.read_bytes().startswith(before + b"\n")


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 400), st.integers(0, 10))
def test_metrics_file_continues_after_any_truncation(tmp_path_factory, cut, resumed):
    directory = tmp_path_factory.mktemp("run")
    track(directory, *map(record, range(1, 11)))
    path = directory / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)])
    left = len(lines(directory))
    track(directory, *(record(step) for step in range(resumed + 1, 13)), first=resumed)
    expected = [*range(1, min(left, resumed) + 1), *range(resumed + 1, 13)]
    assert [line["step"] for line in lines(directory)] == expected


def test_invalid_trailing_lines_are_dropped(tmp_path):
    track(tmp_path, record(1))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write("not json\n[1]\n{}\n")
    track(tmp_path, record(2), first=1)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_metrics_path_option_is_used(tmp_path):
    tracker = JsonLinesTracker(str(tmp_path / "elsewhere" / "records.jsonl"))
    tracker.begin(start(tmp_path))
    tracker.record(record(1))
    tracker.end({})
    assert json.loads((tmp_path / "elsewhere" / "records.jsonl").read_text())["step"] == 1


def test_kill_9_loses_at_most_one_line(tmp_path):
    code = (
        "import sys; sys.path[:0] = [sys.argv[1]]\n"
        "from test_trackers import *\n"
        "tracker = JsonLinesTracker(None)\n"
        "tracker.begin(start(Path(sys.argv[2])))\n"
        "for step in range(1, 10**6):\n"
        "    tracker.record(record(step))\n"
        "    print(step, flush=True)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    for step in range(1, 21):
        assert child.stdout.readline() == f"{step}\n"
    child.send_signal(signal.SIGKILL)
    said = 20 + child.stdout.read().count("\n")
    child.wait()
    steps = [line["step"] for line in lines(tmp_path)]
    assert steps in (list(range(1, said + 1)), list(range(1, said + 2)))


# --- TensorBoard -----------------------------------------------------------------------------------------------------


def curves(directory: Path) -> EventAccumulator:
    found = EventAccumulator(str(directory / "tensorboard"), size_guidance={"histograms": 0, "scalars": 0})
    found.Reload()
    return found


def test_tensorboard_reads_the_curves(tmp_path):
    tracker = TensorBoardTracker(None)
    tracker.begin(start(tmp_path))
    for step in range(1, 6):
        more = {"validation_loss": 9.0} if step == 5 else {}
        tracker.record(record(step, metrics={"blocks.0/load": [1.0, 2.0, 4.0], "blocks.0/share": 0.25}, **more))
    tracker.end({})
    found = curves(tmp_path)
    losses = found.Scalars("loss")
    assert [(point.step, pytest.approx(point.value)) for point in losses] == [(s, 1 / 3 + s) for s in range(1, 6)]
    assert {"grad_norm", "learning_rate", "mfu", "seconds/data", "blocks.0/share"} <= set(found.Tags()["scalars"])
    assert [point.step for point in found.Scalars("validation_loss")] == [5]
    histogram = found.Histograms("blocks.0/load")[0].histogram_value
    assert (histogram.min, histogram.max, histogram.num, histogram.sum) == (1, 4, 3, 7)
    assert sum(histogram.bucket) == 3
    close = make_histogram([0.10555410624084721, 0.1055541062408472])  # neighbouring float64 numbers
    assert (close.num, sum(close.bucket)) == (2, 2)


def test_tensorboard_drops_points_of_abandoned_branch(tmp_path):
    tracker = TensorBoardTracker(None)
    tracker.begin(start(tmp_path))
    for step in range(1, 9):
        tracker.record(record(step))
    for step in range(6, 8):  # after a rollback
        tracker.record(record(step, attempt=2, loss=-1.0))
    tracker.end({})
    tracker = TensorBoardTracker(None)
    tracker.begin(start(tmp_path, first=6))  # resumed, in another process
    tracker.record(record(7, loss=-2.0))
    tracker.end({})
    points = [(point.step, round(point.value, 2)) for point in curves(tmp_path).Scalars("loss")]
    assert points == [*((s, round(1 / 3 + s, 2)) for s in range(1, 6)), (6, -1.0), (7, -2.0)]


def test_tensorboard_shows_a_running_run(tmp_path):
    tracker = TensorBoardTracker(None)
    tracker.begin(start(tmp_path))
    tracker.record(record(1))
    tracker.flushed -= 2  # more than a second later
    tracker.record(record(2))
    assert len(curves(tmp_path).Scalars("loss")) == 2
    tracker.end({})


def test_tensorboard_accepts_nan_and_inf(tmp_path):
    tracker = TensorBoardTracker(str(tmp_path / "tensorboard"))
    tracker.begin(start(tmp_path))
    tracker.record(record(1, loss=math.nan, metrics={"a": [math.nan, math.inf], "b": [], "c": [2.0, math.nan]}))
    tracker.end({})
    assert math.isnan(curves(tmp_path).Scalars("loss")[0].value)
    assert curves(tmp_path).Histograms("c")[0].histogram_value.num == 1


def test_tensorboard_tracker_imports_no_torch_or_tensorflow():
    code = "import sys, gangline_basics.track.tensorboard; sys.exit(bool({'torch', 'tensorflow'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# --- console ----------------------------------------------------------------------------------------------------------


def printed(
    *records: StepRecord, every: int | None = None, last: int = 100, terminal=False, width=200, **summary
) -> str:
    out = io.StringIO()
    tracker = ConsoleTracker(
        every, Terminal(file=out, force_terminal=terminal, width=width, markup=False, highlight=False)
    )
    tracker.begin(start(Path("runs/a"), last=last))
    for one in records:
        tracker.record(one)
    tracker.note("[a] note")
    tracker.end({"why": "done", "steps": len(records), "seconds": 65.0, "tokens": 204800, **summary})
    return out.getvalue()


def test_console_lines_show_main_metrics():
    saved = {"saved": "step-00000001", "checkpoint": "step-00000002"}
    text = printed(record(1), record(2, validation_loss=4.25, **saved), last=2)
    assert "\x1b" not in text, "no control characters off a terminal"
    header, model, data, first, second, more, note, *_ = text.splitlines()
    assert header == "tiny: steps 1 to 2, in runs/a"
    assert model == "  model    6.1 M parameters"
    assert data == "  data     734 files"
    for part in (
        "step 1/2",
        "loss 1.3333",
        "grad 0.5",
        "lr 3.00e-03",
        "12.3 k tok/s",
        "left",
    ):
        assert part in first
    wide = printed(record(1), last=2, terminal=True, width=120)
    wide = re.sub(r"\x1b\[[\d;]*m", "", wide)
    assert "mfu 32.1%" in wide
    assert "mem 537 MB" in wide
    assert "validation 4.2500" in second
    assert more == "  saved step-00000001  saving step-00000002", "what only begins is not saved yet"
    assert "left" not in second, "nothing is left after the last step"
    assert note == "[a] note"


def test_console_in_notebook_prints_plain_lines(monkeypatch):
    assert "\x1b" in printed(record(1), record(2), last=2, terminal=True)
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    text = printed(record(1), record(2), last=2, terminal=True)
    assert "\x1b" not in text
    assert "step 2/2  loss" in text


def test_console_end_shows_summary():
    text = printed(
        record(1, validation_loss=4.25),
        record(2),
        checkpoint="step-00000002",
        directory="runs/a",
        unigram_entropy=3.2361,
        failed_save="No space left on device",
        evidence="loss is nan",
    )
    ending = text[text.index("[a] note") :]
    assert "done: loss is nan, 2 steps in 1:05, 205 k tokens seen" in ending
    assert "  loss 2.3333 at step 2, held-out loss 4.2500 at step 1\n  unigram entropy of the text 3.2361\n" in ending
    assert "No space left on device" in ending
    assert "checkpoint step-00000002" in ending


def test_step_lines_fit_80_columns():
    """Check that events of the step stay, and that the less important values are dropped first."""
    plain, told = record(9_998), record(9_999, validation_loss=4.25, saved="step-00009990")
    records = [replace(one, loss=4.5) for one in (plain, told, record(10_000, checkpoint="step-00010000"))]
    lines = printed(*records, every=1, last=12_345).splitlines()
    lines = lines[next(place for place, line in enumerate(lines) if line.startswith("step")) :][:4]
    assert max(map(len, lines)) <= 80, lines
    assert "tok/s" in lines[0]
    assert "mem" not in lines[0]
    assert "validation 4.2500" in lines[1]
    assert lines[2] == "  saved step-00009990"
    assert "saving step-00010000" in lines[3]


def steps_with_a_line(text: str) -> list[int]:
    return [int(line.split()[1].split("/")[0]) for line in text.splitlines() if line.startswith("step")]


def test_console_prints_line_every_n_steps():
    assert steps_with_a_line(printed(*map(record, range(1, 101)), every=25)) == [1, 25, 50, 75, 100]
    assert 25 <= len(steps_with_a_line(printed(*map(record, range(1, 1001)), last=1000))) <= 35
    assert steps_with_a_line(printed(*map(record, range(1, 4)), last=3)) == [1, 2, 3]


def test_console_prints_line_for_events():
    odd = [record(7, validation_loss=1.0), record(8, checkpoint="step-00000008"), record(9, skipped="not finite")]
    saved, again = record(11, saved="step-00000008"), record(13, checkpoint="step-00000013", failed_save="no room")
    text = printed(*map(record, range(1, 7)), *odd, record(10), saved, record(12), again, every=50)
    assert steps_with_a_line(text) == [1, 7, 8, 9, 11, 13]
    assert "saving step-00000013, because the last save failed" in text
    assert "skipped: not finite" in text


def test_terminal_shows_progress_line():
    text = printed(*map(record, range(1, 11)), every=50, terminal=True)
    assert "\x1b[" in text, "it writes over itself"
    assert "━" in text
    assert "step   2/100" not in printed(*map(record, range(1, 11)), every=50)


def test_remaining_time_follows_step_rate(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    tracker = ConsoleTracker(1, Terminal(file=(out := io.StringIO()), width=200))
    tracker.begin(start(Path("a"), first=10, last=110))
    now[0] += 20
    tracker.record(record(20))
    assert "left 3:00" in out.getvalue()  # 10 steps in 20 s, 90 to go


def test_ending_without_steps_is_printed():
    assert "SIGTERM, 0 steps" in printed(why="SIGTERM")


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (12345, "12.3 k"), (5.3e8, "530 M"), (7e15, "7e+03 T")]
)
def test_quantity_is_formatted_with_unit_prefix(number, text):
    assert format_quantity(number) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (65, "1:05"), (3725, "1:02:05"), (59.7, "1:00")])
def test_duration_is_formatted_as_clock_time(seconds, text):
    assert format_duration(seconds) == text


# --- overhead ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "most"),
    [(lambda: JsonLinesTracker(None), 300e-6), (lambda: TensorBoardTracker(None), 1000e-6)],
    ids=["jsonl", "tensorboard"],
)
def test_tracker_record_takes_microseconds(tmp_path, make, most):
    """Check bounds with room for a busy machine; 36 µs (jsonl) and 140 µs (tensorboard) on a quiet machine."""
    tracker: Tracker = make()
    tracker.begin(start(tmp_path))
    records = [record(step, metrics={"blocks.0/load": [1.0, 2.0]}) for step in range(1, 501)]
    began = time.process_time()
    for one in records:
        tracker.record(one)
    spent = (time.process_time() - began) / len(records)
    tracker.end({})
    assert spent < most


def test_validation_sets_are_printed_by_name(tmp_path):
    losses = {f"set{n}": float(n) for n in range(11)}
    told = record(2, validation_loss=4.25, validation_losses=losses)
    lines = printed(record(1), told, record(3), last=9).splitlines()
    sets = [line for line in lines if "set" in line]
    assert sets[0] == "  validation " + " ".join(f"set{n}={n:.4f}" for n in range(5))
    half = len(sets) // 2
    assert half >= 2
    assert sets[:half] == sets[half:], "beside the step, and at the end"
    assert all(len(line) <= 80 for line in sets)
    tracker = TensorBoardTracker(None)
    tracker.begin(start(tmp_path))
    tracker.record(told)
    tracker.end({})
    assert [(p.step, p.value) for p in curves(tmp_path).Scalars("validation_losses/set7")] == [(2, 7.0)]
