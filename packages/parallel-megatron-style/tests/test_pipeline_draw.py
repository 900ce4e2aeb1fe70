"""Pictures of schedules: every action in its place, readable without colour, well-formed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from gangline_parallel_megatron_style.pipeline.draw import Caption, as_svg, as_text
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import Timeline, simulate
from gangline_testkit import readable

RUN = Caption("Pipeline of a run, step 7", "recorded", "ms")
SVG = "{http://www.w3.org/2000/svg}"


def drawn(name, ranks, microbatches):
    return simulate(make_schedule(name, ranks=ranks, microbatches=microbatches))


def test_text_of_1f1b():
    assert as_text(drawn("1f1b", 2, 3), RUN, width=44).splitlines() == [
        "Pipeline of a run, step 7",
        "recorded",
        "",
        "rank 0  F0 F1 ......B0    F2 B1    ...B2    ",
        "rank 1  ...F0 B0    F1 B1    F2 B2    ......",
        "        0              5              10",
        "time in ms",
        "",
        "F forward   B backward   . waits",
        "12 ms from first to last; ranks wait 25.0 % of it",
    ]


def test_text_without_room_puts_the_numbers_below():
    lines = as_text(drawn("zb_v", 4, 8), RUN).splitlines()
    assert lines[3] == "rank 0  FFFFFFFfiwfiwfiwfIiWFIwfIiWIWwfiWIwfiWwIWfiIwW...IW"
    assert lines[4] == "        0123456000111222303071342413245534566465577676   77"
    assert "small letters: odd chunks" in lines[-2]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_text_fits_a_terminal(name):
    assert max(map(len, as_text(drawn(name, 4, 8), RUN).splitlines())) <= 100


def test_recorded_times_need_not_begin_at_zero_nor_be_even():
    timeline = drawn("1f1b", 2, 3)
    noisy = Timeline(
        timeline.schedule,
        tuple(
            tuple((1000 + s / 10 + rank * 0.001, 1000 + e / 10 + 0.002) for s, e in spans)
            for rank, spans in enumerate(timeline.spans)
        ),
    )
    first, second = as_text(noisy, RUN, width=44).splitlines()[3:5]
    assert first.startswith("rank 0  F0 F1 ......B0")
    assert second.startswith("rank 1  ...F0 B0")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_svg_has_a_box_for_every_action(name):
    timeline = drawn(name, 3, 6)
    root = ElementTree.fromstring(as_svg(timeline, RUN))
    boxes = {rank: [] for rank in range(3)}
    for box in root.iter(f"{SVG}rect"):
        title = box.findtext(f"{SVG}title", "")
        if ": " in title:
            left, wide = float(box.get("x")), float(box.get("width"))
            boxes[int(title[5])].append((left, left + wide, title))
    for rank, found in boxes.items():
        actions = Counter(title.split(", ", 1)[1].split(":")[0] for *_, title in found)
        assert actions == Counter(map(str, timeline.schedule.actions[rank]))
        found.sort()
        assert all(one[1] <= other[0] + 0.02 for one, other in pairwise(found))


@pytest.mark.parametrize("width", [480, 960])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_svg_says_whose_it_is_and_what_it_shows(name, width):
    timeline = drawn(name, 3, 6)
    words = readable(as_svg(timeline, RUN, width))
    assert words[:2] == ["Pipeline of a run, step 7", "recorded"]
    assert any(line.endswith("% of it") for line in words)
    assert any(line.startswith("time (ms)") for line in words)
    assert {"rank", "0", "1", "2", "waits"} <= set(words)
    legend = " ".join(words[words.index("rank") :])
    assert "forward" in legend
    assert ("weight gradient" in legend) == timeline.schedule.splits_backward
    assert ("chunk 1" in legend) == (timeline.schedule.chunks > 1)
