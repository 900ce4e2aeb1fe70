"""Figures and text drawings of pipeline schedules: every action, readable without color."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gangline_basics.figure import render
from gangline_parallel_megatron_style.pipeline.draw import Caption, as_text, make_schedule_figure
from gangline_parallel_megatron_style.pipeline.schedules import SCHEDULES, make_schedule
from gangline_parallel_megatron_style.pipeline.simulate import Timeline, simulate
from gangline_testkit import list_readable, list_tips

RUN = Caption("Pipeline of a run, step 7", "recorded", "ms")


def drawn(name, ranks, microbatches):
    return simulate(make_schedule(name, ranks=ranks, microbatches=microbatches))


def test_1f1b_schedule_is_drawn_as_text():
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
        "12 ms in total; ranks wait 25.0 % of the time",
    ]


def test_narrow_text_puts_microbatch_numbers_below():
    lines = as_text(drawn("zb_v", 4, 8), RUN).splitlines()
    assert lines[3] == "rank 0  FFFFFFFfiwfiwfiwfIiWFIwfIiWIWwfiWIwfiWwIWfiIwW...IW"
    assert lines[4] == "        0123456000111222303071342413245534566465577676   77"
    assert "lower case: odd chunks" in lines[-2]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_text_fits_a_terminal(name):
    assert max(map(len, as_text(drawn(name, 4, 8), RUN).splitlines())) <= 100


def test_text_accepts_uneven_recorded_times():
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
def test_figure_has_a_box_for_every_action(name):
    timeline = drawn(name, 3, 6)
    tips = list_tips(render(make_schedule_figure(timeline, RUN), ".svg").decode())
    boxes = [box for box in make_schedule_figure(timeline, RUN).axes[0].patches if box.get_gid()]
    assert len(boxes) == len(tips)
    for rank, actions in enumerate(timeline.schedule.actions):
        said = [tip.removeprefix(f"rank {rank}, ").split(":")[0] for tip in tips if tip.startswith(f"rank {rank}, ")]
        assert said == list(map(str, actions))
        found = [box for box in boxes if int(box.get_y() + 0.5) == rank]
        assert [box.get_x() + timeline.start for box in found] == pytest.approx([at for at, _ in timeline.spans[rank]])
        assert [box.get_width() for box in found] == pytest.approx([end - at for at, end in timeline.spans[rank]])
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(timeline.spans[rank]))


@pytest.mark.parametrize("width", [480, 960])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_figure_has_title_axes_and_legend(name, width):
    timeline = drawn(name, 3, 6)
    figure = make_schedule_figure(timeline, RUN, width)
    words = list_readable(figure)
    assert figure.get_figwidth() * 96 == width
    assert words[:2] == ["Pipeline of a run, step 7", "recorded"]
    assert any(line.endswith("% of the time") for line in words)
    assert {"rank", "0", "1", "2", "time (ms)", "waits"} <= set(words)
    legend = " ".join(words[words.index("time (ms)") :])
    assert "forward" in legend
    assert ("weight gradient" in legend) == timeline.schedule.splits_backward
    assert ("chunk 1" in legend) == (timeline.schedule.chunks > 1)
