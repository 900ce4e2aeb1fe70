"""Expert load reports: `gangline moe`, `health=experts` and the heatmaps of `track=experts`."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace

import pytest
from matplotlib.colors import to_hex
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gangline.config.check import find_meaningless
from gangline.errors import UserError
from gangline.health import Action
from gangline.record import StepRecord
from gangline.track import Start
from gangline_basics.figure import INK, PALE
from gangline_moe.config import ExpertsHealth
from gangline_moe.health import ExpertsCheck
from gangline_moe.heatmap import HeatmapTracker
from gangline_moe.load_history import StepLoads, load_history, split_steps
from gangline_moe.picture import draw_by_layer, draw_over_time
from gangline_moe.report import choose_shade, format_report, main
from gangline_testkit import HealthCheckSuite, TrackerSuite, list_readable, list_words
from gangline_testkit.health import make_healthy
from gangline_testkit.runs import build_small_run

EVEN, UNEVEN = [8.0, 8.0, 8.0, 8.0], [31.0, 0.0, 1.0, 0.0]


class TestHealth(HealthCheckSuite):
    choice = "health=experts"


class TestTracker(TrackerSuite):
    choice = "track=experts"


def record(step: int, **loads: list[float]) -> StepRecord:
    metrics = {f"blocks.{name[1:]}/load": load for name, load in loads.items()}
    metrics |= {f"blocks.{name[1:]}/entropy": 1.25 for name in loads}
    return replace(make_healthy(1)[0], step=step, metrics=metrics)


@pytest.fixture
def run_dir(tmp_path):
    """Write ten steps, first with even load, then with most tokens on one expert; step 1 is recorded twice."""
    loads = [EVEN] * 5 + [UNEVEN] * 5
    lines = [record(1, b0=UNEVEN, b10=EVEN, b2=EVEN)]
    lines += [record(step + 1, b0=load, b10=EVEN, b2=EVEN) for step, load in enumerate(loads)]
    (tmp_path / "metrics.jsonl").write_text("".join(line.to_json() + "\n" for line in lines))
    return tmp_path


def test_report_prints_and_plots_expert_load(run_dir, capsys):
    assert main(["report", str(run_dir), "--columns", "5", "--svg", str(run_dir / "picture.svg")]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    layers = [line for line in lines if line.startswith("blocks")]
    assert [line.split(":")[0] for line in layers] == ["blocks.0", "blocks.2", "blocks.10"]
    assert layers[0] == "blocks.0: last column max/mean 3.88, no tokens for expert 1, 3, entropy 1.25"
    assert lines[lines.index(layers[0]) + 1] == "     0 |++@@@| 3.88"
    assert lines[lines.index(layers[1]) + 1] == "     0 |+++++| 1.00"
    assert lines[0] == f"load of the experts: {run_dir.name}"
    words = list_words((run_dir / "picture.svg").read_text())
    assert {f"Load of the experts: {run_dir.name}", "steps 1 to 10; each cell covers 2 steps"} <= set(words)
    assert words.count("expert") == 3
    assert words.count("10") == 1  # the last step, below all plots
    assert {"step", "2", "load of an expert / mean load of its layer"} <= set(words)


def test_heatmap_cells_average_loads_of_steps(run_dir):
    first, second, third = draw_over_time(load_history(run_dir), 5, "run").axes[:3]
    assert first.images[0].get_array().tolist() == [
        pytest.approx([1, 1, (8 + 31) / 16, 31 / 8, 31 / 8]),
        pytest.approx([1, 1, 0.5, 0, 0]),
        pytest.approx([1, 1, 9 / 16, 1 / 8, 1 / 8]),
        pytest.approx([1, 1, 0.5, 0, 0]),
    ]
    assert second.images[0].get_array().tolist() == third.images[0].get_array().tolist() == [[1.0] * 5] * 4


def test_repeated_step_counts_once_in_history(run_dir):
    steps = load_history(run_dir)
    assert [step.step for step in steps] == list(range(1, 11))
    assert steps[0].loads["blocks.0"] == EVEN
    assert [len(part) for part in split_steps(steps, 3)] == [3, 3, 4]
    assert len(split_steps(steps, 60)) == 10
    assert format_report(steps, 1, "run").count("|") == 2 * 12


def test_damaged_metrics_lines_are_reported(run_dir, capsys):
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join([*lines[:4], "garbage", *lines[5:]]) + "\n")
    assert main(["report", str(run_dir)]) == 0
    assert "gangline moe report: note: " in (told := capsys.readouterr().err)
    assert "1 line does not contain a step record" in told
    with pytest.warns(UserWarning, match="1 line does not contain a step record"):
        load_history(run_dir)


def test_report_shades_follow_load():
    assert [choose_shade(value) for value in (0.0, 1.0, 2.0, 9.0)] == [" ", "+", "@", "@"]


def test_heatmap_is_blue_below_mean_red_above():
    (image,) = draw_by_layer([StepLoads(1, {"blocks.0": [0.0, 1.0, 2.0, 1.0]}, {})], "run").axes[0].images
    low, mean, high = (to_hex(image.to_rgba([value])[0]) for value in (0.0, 1.0, 2.0))
    assert (low, mean, high) == ("#053061", "#f7f6f6", "#67001f")
    assert to_hex(image.to_rgba([5.0])[0]) == high
    assert to_hex(image.to_rgba([math.nan])[0]) == PALE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["report", "nowhere"], "nowhere/metrics.jsonl is missing or cannot be read"),
        (["report", "{}", "--columns", "0"], "--columns 0: expected a number above 0"),
        (["reprot", "{}"], "there is no gangline moe reprot"),
        (["report", "{}", "--svg", "/nowhere/picture.svg"], "cannot be written"),
    ],
)
def test_report_refuses_invalid_arguments(run_dir, words, message):
    with pytest.raises(UserError, match=message):
        main([word.format(run_dir) for word in words])


def test_history_of_run_without_experts_is_refused(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "metrics": {}}) + "\n")
    with pytest.raises(UserError, match="has no step with the load of experts"):
        load_history(tmp_path)


def test_dead_and_hot_experts_are_reported_once():
    check = ExpertsCheck(ExpertsHealth(patience=3, hot=2.0), build_small_run("moe=on"))
    found = [(step, str(v)) for step in range(1, 9) for v in check.observe(record(step, b0=UNEVEN))]
    assert found == [
        (3, "hot-expert at blocks.0, expert 0: 3.9 times the mean load for 3 consecutive steps"),
        (3, "dead-expert at blocks.0, expert 1: no token for 3 consecutive steps"),
        (3, "dead-expert at blocks.0, expert 3: no token for 3 consecutive steps"),
    ]
    list(check.observe(record(9, b0=EVEN)))
    assert not [v for step in (10, 11) for v in check.observe(record(step, b0=UNEVEN))]
    again = ExpertsCheck(ExpertsHealth(patience=3, hot=2.0), build_small_run("moe=on"))
    again.load_state(json.loads(json.dumps(check.state())))
    (hot, *_) = again.observe(record(12, b0=UNEVEN))
    assert hot.suggestion is Action.WARN


def test_tensorboard_reads_load_heatmaps(tmp_path):
    tracker = HeatmapTracker(None, 2)
    tracker.begin(Start("run", str(tmp_path), 0, 5, 1, 0, 1))
    for step in range(1, 6):
        tracker.record(record(step, b0=EVEN, b1=UNEVEN))
    tracker.end({})
    read = EventAccumulator(str(tmp_path / "tensorboard" / "experts"))
    read.Reload()
    images = read.Images("experts/load")
    assert [image.step for image in images] == [2, 4, 5]
    drawn = Image.open(io.BytesIO(images[0].encoded_image_string))
    assert drawn.size == (images[0].width, images[0].height)
    colours = {f"#{r:02x}{g:02x}{b:02x}" for _, (r, g, b) in drawn.convert("RGB").getcolors(1 << 20)}
    (cells,) = draw_by_layer([StepLoads(1, {"blocks.0": UNEVEN}, {})], "run").axes[0].images
    assert {INK, *(to_hex(cells.to_rgba([load])[0]) for load in (1, 3.9, 0, 0.125))} <= colours


@pytest.mark.parametrize(("layers", "experts", "steps"), [(1, 2, 1), (3, 8, 7), (2, 60, 200), (20, 160, 2)])
def test_heatmaps_of_every_size_are_readable(layers, experts, steps):
    loads = {f"blocks.{layer}": [float(expert) for expert in range(experts)] for layer in range(layers)}
    found = [StepLoads(step, dict(loads), {}) for step in range(1, steps + 1)]
    del found[0].loads["blocks.0"]
    if not found[0].loads:
        found[0].loads["blocks.0"] = [1.0] * experts
    words = list_readable(draw_by_layer(found, "runs/a"))
    assert words[0] == "Load of the experts: runs/a"
    assert {"layer", "expert", "blocks.0", f"blocks.{layers - 1}", "0"} <= set(words)
    words = list_readable(draw_over_time(found, 60, "runs/a"))
    assert {"step", str(split_steps(found, 60)[0][-1].step), "blocks.0", f"blocks.{layers - 1}"} <= set(words)
    assert words.count("expert") == layers


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("health=experts", "health.experts.patience=0"), "health.experts.patience=0 must be at least 1."),
        (("health=experts", "health.experts.hot=1"), "health.experts.hot=1.0 must be more than 1, or inf."),
        (("track=experts", "track.experts.every=0"), "track.experts.every=0 must be at least 1."),
    ],
)
def test_invalid_health_and_tracker_options_are_refused(words, message):
    (problem,) = find_meaningless(build_small_run("moe=on", *words))
    assert problem.what == message


def test_tracker_without_matplotlib_is_refused(monkeypatch):
    run = build_small_run("moe=on", "track=experts")
    assert run.track["experts"].check(run) == []
    monkeypatch.setattr("gangline_moe.config.find_spec", lambda name: None)
    (problem,) = run.track["experts"].check(run)
    assert problem.what == "track=experts draws figures with matplotlib, which is not installed."
    assert "pip install 'gangline-moe[pictures]'" in problem.fix


def test_infinite_hot_threshold_is_accepted():
    assert find_meaningless(build_small_run("moe=on", "health=experts", "health.experts.hot=inf")) == []
