"""Checks of the text in figures that `gangline_basics.figure` draws: size, colour, overlaps, title and tooltips."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from matplotlib.backends.backend_agg import RendererAgg
from matplotlib.colors import to_hex

from gangline_basics.figure import INK, render, use_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SVG = "{http://www.w3.org/2000/svg}"
SMALLEST = 8  # minimum size of text in points
Box = tuple[float, float, float, float]  # left, bottom, right, top


@dataclass(frozen=True)
class Words:
    """One drawn line of text in a figure. box: in pixels."""

    text: str
    box: Box
    points: float
    colour: str
    bold: bool


class _Recorder(RendererAgg):
    """Renderer that records each line of text with its position."""

    def __init__(self, width: float, height: float, dpi: float) -> None:
        super().__init__(width, height, dpi)
        self.lines: list[Words] = []

    def draw_text(self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float, *_: Any, **__: Any) -> None:
        wide, high, below = self.get_text_width_height_descent(s, prop, False)
        y, high = self.height - y, high - below  # height of the text without descenders
        box = (x, y, x + wide, y + high) if angle == 0 else (x - high, y, x, y + wide)
        if s.strip():
            bold = prop.get_weight() == "bold"
            self.lines.append(Words(s, box, prop.get_size_in_points(), to_hex(gc.get_rgb()), bold))


@use_style()
def list_readable(figure: Figure) -> list[str]:
    """Return the lines of text in a figure from top to bottom and from left to right.

    Raises AssertionError if text is outside of the figure, overlaps other text, or is small or pale, if the first line
    is not the title, or if a legend covers a plot.
    """
    render(figure, ".svg")
    wide, high = figure.bbox.size
    recorder = _Recorder(wide, high, figure.dpi)
    figure.draw(recorder)
    lines = sorted(recorder.lines, key=lambda line: (-round(line.box[3], -1), line.box[0]))
    for line in lines:
        assert line.box[0] >= 0, f"the text {line.text!r} extends beyond the left edge of the figure"
        assert line.box[1] >= 0, f"the text {line.text!r} extends below the figure"
        assert line.box[2] <= wide, (
            f"the text {line.text!r} ends at x={line.box[2]:.0f}, beyond the figure width {wide:.0f}"
        )
        assert line.box[3] <= high, (
            f"the text {line.text!r} ends at y={line.box[3]:.0f}, above the figure height {high:.0f}"
        )
        assert line.points >= SMALLEST, f"the text {line.text!r} has {line.points} points, less than {SMALLEST}"
        assert line.colour == INK, f"the text {line.text!r} has the colour {line.colour}, expected {INK}"
    for one, other in combinations(lines, 2):
        assert not _touch(one.box, other.box), f"the texts {one.text!r} and {other.text!r} overlap"
    assert lines, "the figure has no text"
    assert lines[0].bold and figure.get_suptitle().startswith(lines[0].text), "the first text is not the title"  # noqa: PT018
    for axes in figure.axes:
        if legend := axes.get_legend():
            box = legend.get_window_extent(recorder).extents
            assert not any(_touch(box, plot.bbox.extents) for plot in figure.axes), "a legend overlaps a plot"
    return [line.text for line in lines]


def list_words(svg: str) -> list[str]:
    """Return the lines of text of an SVG file, in the order of the file."""
    return [text.text or "" for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def list_tips(svg: str) -> list[str]:
    """Return the tooltips of an SVG file, in the order of the file."""
    groups = ElementTree.fromstring(svg).iter(f"{SVG}g")
    return [tip for group in groups if (tip := group.findtext(f"{SVG}title")) is not None]


def _touch(one: Any, other: Any) -> bool:
    return bool(one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3])
