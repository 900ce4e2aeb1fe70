"""Pictures of plans: what their rectangles and letters say is what the plan says."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree

import pytest

from gangline.cli.main import main
from gangline.cluster.file import Quantity, load_cluster
from gangline_planner.assumed import explain, planned
from gangline_planner.forecast import forecast
from gangline_planner.pictures.colours import letters
from gangline_planner.pictures.plan import plan_figure
from gangline_planner.pictures.terminal import WIDE, memory_bars, plane, stacked, step_bar, timeline
from gangline_testkit.figures import SVG, readable

WORDS = (
    "parallel=3d launch.processes=16 parallel.pp=4 parallel.tp=2 batch.global_size=32 batch.micro_size=1 "
    "model.layers=8 batch.sequence_length=128 precision=fp32"
)


@pytest.fixture(scope="module")
def plan():
    case, cluster = planned(WORDS.split()), load_cluster("h100_ib")
    cluster = cluster.with_numbers({"memory.bytes": Quantity(2e7, "a test")})  # of which small models fill much
    return forecast(explain(case, case.run, cluster), cluster)


def tips(picture: str) -> list[tuple[str, float]]:
    """What is said of each rectangle, and how wide it is."""
    rects = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [(rect.findtext(f"{SVG}title", ""), float(rect.get("width", "0"))) for rect in rects]


def test_an_svg_can_be_read_and_its_bars_are_as_long_as_what_they_stand_for(plan):
    picture = plan_figure(plan).svg()
    words = readable(picture)
    assert words[0].startswith("A step of 16 ranks of h100_ib: ")
    assert {"forward", "backward", "weights"} <= set(words)
    said = tips(picture)
    wide = {tip.partition(":")[0]: width for tip, width in said if tip.endswith(" s")}
    kinds = plan.step.kinds
    assert wide["compute"] / wide["host"] == pytest.approx(kinds["compute"] / kinds["host"], rel=0.01)
    first, last = (sum(width for tip, width in said if tip.startswith(f"rank {rank}, ")) for rank in (0, 3))
    ranks = plan.explained.ranks
    assert first > 50
    assert first / last == pytest.approx(ranks[0].memory / ranks[3].memory, rel=0.03)  # slivers are not drawn
    actions = [tip for tip, _ in said if tip.startswith("StepAction")]
    assert len(actions) == sum(len(spans) for spans in plan.step.timeline.spans)


def test_a_stacked_bar_is_as_long_as_its_parts_and_no_part_moves_another():
    parts = {"one": 1.0, "two": 2.0, "none": 0.0, "half": 0.5}
    named = letters(parts)
    assert len(set(named.values())) == 4
    bar = stacked(parts, named, 7.0, wide=70)
    assert Counter(bar) == {named["one"]: 10, named["two"]: 20, named["half"]: 5}


def test_a_terminal_shows_the_step_the_memory_and_the_pipeline(plan):
    bar = next(iter(step_bar(plan.step.kinds)))
    assert len(bar.strip().strip("|")) == WIDE
    rows = list(memory_bars([rank.bytes for rank in plan.explained.ranks], 80e9))
    assert len(rows) == 5
    assert all("|" in row for row in rows)
    lines = [line[8:] for line in timeline(plan.step.timeline)][:4]
    assert [line.index("F") for line in lines] == sorted(line.index("F") for line in lines)
    assert lines[0][0] == "F"
    assert lines[0].rstrip(".")[-1] in "BW"  # the first stage ends last
    assert lines[3][0] == "."  # while it has nothing to do yet


def test_points_of_a_plane_are_where_their_numbers_say():
    shown = plane([(1.0, 10.0), (2.0, 20.0), (2.0, 10.0)], [(1.0, 10.0)], ("x", "y")).splitlines()
    grid = [line[11:] for line in shown[1:-2]]
    assert grid[0].rstrip() == " " * (WIDE - 1) + "."  # (2, 20)
    assert grid[-1] == "*" + " " * (WIDE - 2) + "."


def test_files_are_written_beside_the_text(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *WORDS.split(), "cluster=h100_ib", "--svg", "plan.svg"]) == 0
    assert "the pipeline, 1f1b" in capsys.readouterr().out
    small = "parallel=ddp launch.processes=4 batch.global_size=16 model.layers=2 cluster=h100_ib"
    assert main(["plan", "search", *small.split(), "--svg=front.svg"]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^ .*\|.*\*", printed, re.MULTILINE)
    assert readable((tmp_path / "plan.svg").read_text())
    assert "none is both faster and smaller" in readable((tmp_path / "front.svg").read_text())


@pytest.mark.parametrize("path", ["plan.png", "nowhere/plan.svg"])
def test_a_file_that_cannot_be_written(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    words = "parallel=single batch.global_size=4 cluster=h100_ib"
    assert main(["plan", *words.split(), "--svg", path]) == 2
    assert f"--svg {path}" in capsys.readouterr().err
