"""Pictures: what is drawn can be read, whichever way it is written; what cannot be read is found."""

from __future__ import annotations

import io
import re

import pytest
from PIL import Image

from gangline.figure import GAP, INK, PALETTE, Figure, PlotArea, diverging, number_ticks, room_left
from gangline_testkit import readable


def drawn(title: str = "A run, steps 1 to 20", rows: int = 40) -> Figure:
    ticks = [((row + 0.5) / rows, f"layer {row}") for row in range(rows)]
    figure = Figure(title, "what it shows\nand how", 480)
    frame = PlotArea(GAP + room_left(ticks), figure.bottom, 330, 200)
    figure.rect(frame.left, frame.top, 100, 50, PALETTE[0], "a <tip> & more")
    figure.axis_left(frame, "layer", ticks)
    figure.axis_below(frame, "seconds (s)", number_ticks(1234, 20))
    figure.legend(frame.left, figure.bottom + GAP, [(fill, f"number {fill}") for fill in PALETTE])
    figure.colour_bar(PlotArea(frame.left, figure.bottom + GAP, 200, 12), "share", [(0, "0"), (1, "1")], diverging)
    return figure


@pytest.mark.parametrize("title", ["short", "one & <two> " * 20, "x" * 200])
def test_what_is_drawn_can_be_read(title):
    words = readable(drawn(title).svg())
    assert re.sub(r"\s", "", "".join(words)).startswith(re.sub(r"\s", "", title) + "whatitshowsandhow")
    assert {"layer", "seconds (s)", "share", *(f"number {fill}" for fill in PALETTE)} <= set(words)
    assert len([word for word in words if word.startswith("layer ")]) == 14  # every 3rd


def test_both_ways_of_writing_show_the_same():
    figure = drawn()
    wide, high, file = figure.png()
    image = Image.open(io.BytesIO(file)).convert("RGB")
    assert image.size == (wide, high) == (480, int(re.search(r'height="(\d+)"', figure.svg())[1]))
    colours = {"#{:02x}{:02x}{:02x}".format(*rgb) for _, rgb in image.getcolors(1 << 16)}
    assert {INK, *PALETTE, diverging(0.5 / 40)} <= colours


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda figure: figure.text(470, 100, "too far right"), "ends at"),
        (lambda figure: figure.text(2, 100, "too far left", anchor="end"), "begins left"),
        (lambda figure: figure.text(12, 24, "over the title"), "touch"),
        (lambda figure: figure.text(200, figure.bottom + 20, "small", size=8), "is small"),
        (lambda figure: figure.rect(0, 0, 481, 5, INK, "wide"), "ends at"),
        (lambda figure: figure.marks.clear(), "has words"),
    ],
)
def test_what_cannot_be_read_is_found(spoil, complaint):
    figure = drawn()
    spoil(figure)
    with pytest.raises(AssertionError, match=complaint):
        readable(figure.svg())


@pytest.mark.parametrize("high", [0.003, 1, 7, 51, 1234.5, 1e6])
def test_ticks_are_even_numbers(high):
    ticks = number_ticks(high)
    assert 4 <= len(ticks) <= 9
    assert all(0 <= at <= 1 and float(number) == pytest.approx(at * high) for at, number in ticks)
    assert {re.sub(r"[0.]|e[+-]\d+", "", ticks[1][1])} <= {"1", "2", "5"}
