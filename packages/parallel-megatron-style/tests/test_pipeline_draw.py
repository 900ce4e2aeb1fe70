"""Pictures of schedules: every action in its place, readable without colour, well-formed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from gangline_parallel_megatron_style.pipeline.draw import as_svg, as_text
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import Timeline, simulate

SVG = "{http://www.w3.org/2000/svg}"


def drawn(name, ranks, micros):
    return simulate(make_schedule(name, ranks=ranks, micros=micros))


def test_text_of_1f1b():
    assert as_text(drawn("1f1b", 2, 3), width=44).splitlines() == [
        "rank 0  F0 F1 ......B0    F2 B1    ...B2    ",
        "rank 1  ...F0 B0    F1 B1    F2 B2    ......",
        "",
        "F forward   B backward   . waits",
        "12 from first to last, 25.0 % of it waiting",
    ]


def test_text_without_room_puts_the_numbers_below():
    lines = as_text(drawn("zb_v", 4, 8)).splitlines()
    assert lines[0] == "rank 0  FFFFFFFfiwfiwfiwfIiWFIwfIiWIWwfiWIwfiWwIWfiIwW...IW"
    assert lines[1] == "        0123456000111222303071342413245534566465577676   77"
    assert "small letters: odd chunks" in lines[-2]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_text_fits_a_terminal(name):
    assert max(map(len, as_text(drawn(name, 4, 8)).splitlines())) <= 100


def test_recorded_times_need_not_begin_at_zero_nor_be_even():
    timeline = drawn("1f1b", 2, 3)
    noisy = Timeline(
        timeline.schedule,
        tuple(
            tuple((1000 + s / 10 + rank * 0.001, 1000 + e / 10 + 0.002) for s, e in spans)
            for rank, spans in enumerate(timeline.spans)
        ),
    )
    first, second = as_text(noisy, width=44).splitlines()[:2]
    assert first.startswith("rank 0  F0 F1 ......B0")
    assert second.startswith("rank 1  ...F0 B0")


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_svg_has_a_box_for_every_action(name):
    timeline = drawn(name, 3, 6)
    root = ElementTree.fromstring(as_svg(timeline))
    width, height = map(float, root.get("viewBox").split()[2:])
    boxes = {rank: [] for rank in range(3)}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title").text
        left, wide, top = (float(box.get(key)) for key in ("x", "width", "y"))
        assert 0 <= left <= left + wide <= width
        assert 0 <= top < top + float(box.get("height")) <= height
        if ": " in title:
            boxes[int(title[5])].append((left, left + wide, title))
    for rank, found in boxes.items():
        actions = Counter(title.split(", ", 1)[1].split(":")[0] for *_, title in found)
        assert actions == Counter(map(str, timeline.schedule.actions[rank]))
        found.sort()
        assert all(one[1] <= other[0] + 0.02 for one, other in pairwise(found))
    words = " ".join(text.text for text in root.iter(f"{SVG}text"))
    assert "of it waiting" in words
    assert "forward" in words
    assert ("weight gradient" in words) == timeline.schedule.splits_backward


def test_svg_colours_suit_light_and_dark_pages():
    picture = as_svg(drawn("zb_v", 2, 4))
    assert "prefers-color-scheme: dark" in picture
    used = {part.split('"')[0] for part in picture.split('class="')[1:]}
    assert used == {"word", "wait", "F0", "F1", "I0", "I1", "W0", "W1"}
    assert all(f".{name} {{" in picture for name in used)
