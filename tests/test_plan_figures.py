"""Figures of plans: bars, labels and terminal plots match the numbers of the plan."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from gangline.cli.main import main
from gangline_basics.cluster.file import Quantity, load_cluster
from gangline_basics.figure import render
from gangline_planner.assumed import complete_words, explain
from gangline_planner.forecast import forecast
from gangline_planner.pictures.colours import choose_letters
from gangline_planner.pictures.front import draw_front
from gangline_planner.pictures.plan import draw_plan
from gangline_planner.pictures.terminal import (
    WIDE,
    draw_bar,
    draw_memory_bars,
    draw_points,
    draw_step_bar,
    draw_timeline,
)
from gangline_testkit import list_readable, list_tips, list_words

WORDS = (
    "parallel=3d launch.processes=16 parallel.pp=4 parallel.tp=2 batch.global_size=32 batch.micro_size=1 "
    "model.layers=8 batch.sequence_length=128 precision=fp32"
)


@pytest.fixture(scope="module")
def plan():
    case, cluster = complete_words(WORDS.split()), load_cluster("h100_ib")
    cluster = cluster.replace_numbers({"memory.bytes": Quantity(2e7, "a test")})  # makes bars visible
    return forecast(explain(case, case.run, cluster), cluster)


def test_plan_figure_bars_match_numbers(plan):
    figure = draw_plan(plan)
    words = list_readable(figure)
    assert words[0].startswith("A step of 16 ranks of h100_ib: ")
    assert {"forward", "backward", "waits", "weights", "accelerator", "compute", "host"} <= set(words)
    assert {
        "step time in seconds",
        "memory in GB",
        "time of forward and backward passes in seconds",
        "pipeline rank",
    } <= set(words)
    step, memory, passes = figure.axes
    kinds = {kind: seconds for kind, seconds in plan.step.kinds.items() if seconds > 1e-9}
    assert dict(zip(kinds, [bar.get_width() for bar in step.patches], strict=True)) == pytest.approx(kinds)
    for number, rank in enumerate(plan.explained.ranks):
        row = [bar for bar in memory.patches if round(bar.get_y() + 0.4) == number]
        assert sum(bar.get_width() for bar in row) == pytest.approx(rank.memory / 1e9)
        assert max(bar.get_x() + bar.get_width() for bar in row) == pytest.approx(rank.memory / 1e9)
    (limit,) = memory.get_lines()
    assert limit.get_xdata() == pytest.approx([0.02, 0.02])
    boxes = [path.get_extents() for collection in passes.collections for path in collection.get_paths()]
    for number, spans in enumerate(plan.step.timeline.spans):
        drawn = sorted((box.x0, box.x1) for box in boxes if round(box.y0 + 0.4) == number)
        assert [at for box in drawn for at in box] == pytest.approx([at for _, *span in spans for at in span])


def test_front_figure_labels_every_layout():
    layouts = [(1.0 + number / 10, 50.0 - number, f"parallel.tp={number}") for number in range(9)]
    figure = draw_front("Layouts on h100_ib", layouts, layouts[:1], 80.0)
    words = list_readable(figure)
    assert {
        "step time in seconds",
        "memory of the fullest rank in GB",
        "Pareto front: no layout is both faster and smaller",
    } <= set(words)
    assert list_tips(render(figure, ".svg").decode()) == [
        f"{seconds:.4g} s, {gigabytes:.4g} GB: {typed}" for seconds, gigabytes, typed in [*layouts, layouts[0]]
    ]
    *dots, limit = figure.axes[0].get_lines()
    assert [tuple(dot.get_xydata()[0]) for dot in dots] == [layout[:2] for layout in [*layouts, layouts[0]]]
    assert [*limit.get_ydata()] == [80, 80]


def test_long_timeline_is_drawn_as_image(plan, monkeypatch):
    monkeypatch.setattr("gangline_planner.pictures.plan.VECTORS", 10)
    figure = draw_plan(plan)
    assert b"<image" in render(figure, ".svg")
    assert list_readable(figure)


def test_stacked_bar_length_matches_parts():
    parts = {"one": 1.0, "two": 2.0, "none": 0.0, "half": 0.5}
    named = choose_letters(parts)
    assert len(set(named.values())) == 4
    bar = draw_bar(parts, named, 7.0, wide=70)
    assert Counter(bar) == {named["one"]: 10, named["two"]: 20, named["half"]: 5}


def test_terminal_shows_step_memory_and_pipeline(plan):
    bar = next(iter(draw_step_bar(plan.step.kinds)))
    assert len(bar.strip().strip("|")) == WIDE
    rows = list(draw_memory_bars([rank.bytes for rank in plan.explained.ranks], 80e9))
    assert len(rows) == 5
    assert all("|" in row for row in rows)
    lines = [line[8:] for line in draw_timeline(plan.step.timeline)][:4]
    assert [line.index("F") for line in lines] == sorted(line.index("F") for line in lines)
    assert lines[0][0] == "F"
    assert lines[0].rstrip(".")[-1] in "BW"  # the first stage finishes last
    assert lines[3][0] == "."  # the last stage is idle at first


def test_terminal_plot_places_points_by_value():
    shown = draw_points([(1.0, 10.0), (2.0, 20.0), (2.0, 10.0)], [(1.0, 10.0)], ("x", "y")).splitlines()
    grid = [line[11:] for line in shown[1:-2]]
    assert grid[0].rstrip() == " " * (WIDE - 1) + "."  # the point (2, 20)
    assert grid[-1] == "*" + " " * (WIDE - 2) + "."


def test_svg_files_are_written_with_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *WORDS.split(), "cluster=h100_ib", "--svg", "plan.svg"]) == 0
    assert "timeline of the pipeline, schedule 1f1b" in capsys.readouterr().out
    small = "parallel=ddp launch.processes=4 batch.global_size=16 model.layers=2 cluster=h100_ib"
    assert main(["plan", "search", *small.split(), "--svg=front.svg"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ .*\|.*\*", printed, re.MULTILINE)
    assert "pipeline rank" in list_words((tmp_path / "plan.svg").read_text())
    assert "Pareto front: no layout is both faster and smaller" in list_words((tmp_path / "front.svg").read_text())


@pytest.mark.parametrize("path", ["plan.png", "nowhere/plan.svg"])
def test_unwritable_svg_file_is_refused(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    words = "parallel=single batch.global_size=4 cluster=h100_ib"
    assert main(["plan", *words.split(), "--svg", path]) == 2
    assert f"--svg {path}" in capsys.readouterr().err
