"""Pictures fit for a page: a title, axes with units, a legend. One description, written as SVG or as PNG.

Dark letters on white, so that a picture reads the same on a light page, on a dark one and in print. The colours are
told apart by people who do not see some of them: PALETTE is of Okabe and Ito ("Color Universal Design", 2008),
`diverging` of ColorBrewer (RdBu, Harrower and Brewer, The Cartographic Journal 40, 2003).

    figure = Figure("Loss of runs/a", "steps 1 to 20", width=640)
    frame = Frame(60, figure.bottom, 500, 100)
    figure.rect(frame.left, frame.top, 10, 10, "#2166ac", tip="step 1")
    figure.axis_below(frame, "step", [(0.0, "1"), (1.0, "20")])
    figure.legend(frame.left, figure.bottom, [("#2166ac", "training")])
    Path("picture.svg").write_text(figure.svg())

Lengths are pixels, y grows downwards. Torch-free; PNG needs Pillow, which comes with TensorBoard.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal

INK, PALE = "#1a1a1a", "#d9d9d9"  # of letters and axes; of what holds no value
PALETTE = ("#56b4e9", "#009e73", "#e69f00", "#f0e442", "#cc79a7", "#0072b2", "#d55e00")
SIZE, TITLE, GAP = 12, 15, 8  # of letters, of the title's letters, between what stands beside each other
_FONTS = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_RD_BU = ("#2166ac", "#67a9cf", "#d1e5f0", "#f7f7f7", "#fddbc7", "#ef8a62", "#b2182b")

_NARROW, _WIDE = " .,:;|'!()[]fijlrt-/Is", "mwMW%@+=<>"

Anchor = Literal["start", "middle", "end"]
Ticks = Sequence[tuple[float, str]]  # where along the axis, 0 to 1, and what stands there


@dataclass(frozen=True)
class PlotArea:
    """The rectangle that the axes of a plot enclose."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.left + self.width

    @property
    def bottom(self) -> float:
        return self.top + self.height


@dataclass(frozen=True)
class RectMark:
    left: float
    top: float
    width: float
    height: float
    fill: str
    tip: str
    outline: bool


@dataclass(frozen=True)
class LineMark:
    x0: float
    y0: float
    x1: float
    y1: float


@dataclass(frozen=True)
class CurveMark:
    """Straight lines from point to point."""

    points: tuple[tuple[float, float], ...]
    colour: str


@dataclass(frozen=True)
class TextMark:
    """(x, y) is the anchor on the base line; turned: reads from below to above."""

    x: float
    y: float
    words: str
    size: int
    anchor: Anchor
    bold: bool
    turned: bool


class Figure:
    """A picture with its title at the top, of a given width, and as high as its content."""

    def __init__(self, title: str, about: str, width: float) -> None:
        self.title, self.width = title, width
        self.marks: list[RectMark | LineMark | CurveMark | TextMark] = []
        self.bottom = float(GAP)  # of all that is in it so far
        for line in wrapped(title, TITLE, width - 2 * GAP, bold=True):
            self.text(GAP, self.bottom + TITLE, line, size=TITLE, bold=True)
        for line in [part for lines in about.splitlines() for part in wrapped(lines, SIZE, width - 2 * GAP)]:
            self.text(GAP, self.bottom + SIZE + 2, line)
        self.bottom += GAP

    def rect(
        self, left: float, top: float, width: float, height: float, fill: str, tip: str = "", outline: bool = False
    ) -> None:
        """tip: what a browser shows under the pointer."""
        self.marks.append(RectMark(left, top, width, height, fill, tip, outline))
        self.bottom = max(self.bottom, top + height)

    def line(self, x0: float, y0: float, x1: float, y1: float) -> None:
        self.marks.append(LineMark(x0, y0, x1, y1))
        self.bottom = max(self.bottom, y0, y1)

    def curve(self, points: Iterable[tuple[float, float] | None], colour: str) -> None:
        """Lines from point to point, left to right; None is a gap."""
        whole: list[tuple[float, float]] = []
        for point in [*points, None]:
            if point is not None:
                whole.append(point)
            elif whole:
                self.marks.append(CurveMark(tuple(whole if len(whole) > 1 else whole * 2), colour))
                self.bottom = max(self.bottom, *(y for _, y in whole))
                whole = []

    def text(
        self,
        x: float,
        y: float,
        words: str,
        size: int = SIZE,
        anchor: Anchor = "start",
        bold: bool = False,
        turned: bool = False,
    ) -> None:
        self.marks.append(TextMark(x, y, words, size, anchor, bold, turned))
        self.bottom = max(self.bottom, y + (span(words, size, bold) / 2 if turned else 0.3 * size))

    def axis_below(self, frame: PlotArea, label: str, ticks: Ticks) -> None:
        """The horizontal axis; where words would touch, every 2nd, 3rd, ... tick is left."""
        self.line(frame.left, frame.bottom, frame.right, frame.bottom)
        for at, words in _apart(ticks, frame.width, lambda words: span(words, SIZE) + GAP):
            x = frame.left + at * frame.width
            self.line(x, frame.bottom, x, frame.bottom + 4)
            self.text(x, frame.bottom + 6 + SIZE, words, anchor="middle")
        if label:
            self.text(frame.left + frame.width / 2, frame.bottom + 12 + 2 * SIZE, label, anchor="middle")

    def axis_left(self, frame: PlotArea, label: str, ticks: Ticks) -> None:
        """The vertical axis, from above to below. It takes `room_left(ticks)` pixels."""
        self.line(frame.left, frame.top, frame.left, frame.bottom)
        for at, words in _apart(ticks, frame.height, lambda _: 1.2 * SIZE):
            y = frame.top + at * frame.height
            self.line(frame.left - 4, y, frame.left, y)
            self.text(frame.left - 6, y + 0.35 * SIZE, words, anchor="end")
        if label:
            x = frame.left - 6 - _widest(ticks) - GAP
            self.text(x, frame.top + frame.height / 2, label, anchor="middle", turned=True)

    def legend(self, left: float, top: float, entries: Iterable[tuple[str, str]]) -> None:
        """A swatch and a word for each (colour, word), in as many rows as they need."""
        x, y = left, top
        for fill, words in entries:
            wide = 20 + span(words, SIZE)
            if x > left and x + wide > self.width - GAP:
                x, y = left, y + 20
            self.rect(x, y, 14, 14, fill, words, outline=True)
            self.text(x + 20, y + 12, words)
            x += wide + 2 * GAP

    def colour_bar(self, frame: PlotArea, label: str, ticks: Ticks, colour: Callable[[float], str]) -> None:
        """A legend of colours that stand for numbers; colour(share): of a place along it, 0 to 1."""
        cells = 40
        wide = frame.width / cells
        for cell in range(cells):
            self.rect(
                frame.left + cell * wide, frame.top, wide, frame.height, colour((cell + 0.5) / cells), "colour scale"
            )
        self.axis_below(frame, label, ticks)

    @property
    def height(self) -> float:
        return self.bottom + GAP

    def svg(self) -> str:
        """One self-contained SVG element."""
        wide, high = f"{self.width:g}", f"{math.ceil(self.height)}"
        head = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" width="{wide}" height="{high}" '
            f'role="img" aria-label="{escape(self.title)}" font-family="{_FONTS}" fill="{INK}">',
            f"<title>{escape(self.title, quote=False)}</title>",
            f'<rect width="{wide}" height="{high}" fill="#ffffff"/>',
        ]
        return "\n".join([*head, *map(_element, self.marks), "</svg>", ""])

    def png(self) -> tuple[int, int, bytes]:
        """(width, height, file). Raises ImportError where Pillow is not installed."""
        from PIL import Image, ImageDraw, ImageFont

        wide, high = math.ceil(self.width), math.ceil(self.height)
        image = Image.new("RGB", (wide, high), "#ffffff")
        canvas = ImageDraw.Draw(image)
        for mark in self.marks:
            if isinstance(mark, RectMark):
                corners = [mark.left, mark.top, mark.left + mark.width - 1, mark.top + mark.height - 1]
                canvas.rectangle([round(place) for place in corners], mark.fill, INK if mark.outline else None)
            elif isinstance(mark, LineMark):
                canvas.line([mark.x0, mark.y0, mark.x1, mark.y1], INK)
            elif isinstance(mark, CurveMark):
                canvas.line([place for point in mark.points for place in point], mark.colour, 2, "curve")
            else:
                font: Any = ImageFont.load_default(mark.size)
                corner = {"start": "ls", "middle": "ms", "end": "rs"}[mark.anchor]
                if mark.turned:
                    box = font.getbbox(mark.words)
                    label = Image.new("RGB", (box[2], box[3] + 2), "#ffffff")
                    ImageDraw.Draw(label).text((0, 0), mark.words, INK, font)
                    turned = label.rotate(90, expand=True)
                    image.paste(turned, (round(mark.x - turned.width), round(mark.y - turned.height / 2)))
                else:
                    for shift in (0.0, 0.6) if mark.bold else (0.0,):
                        canvas.text((mark.x + shift, mark.y), mark.words, INK, font, anchor=corner)
        file = io.BytesIO()
        image.save(file, "PNG")
        return wide, high, file.getvalue()


def _element(mark: RectMark | LineMark | CurveMark | TextMark) -> str:
    if isinstance(mark, CurveMark):
        points = " ".join(f"{x:.2f},{y:.2f}" for x, y in mark.points)
        line = 'fill="none" stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"'
        return f'<polyline points="{points}" {line} stroke="{mark.colour}"/>'
    if isinstance(mark, LineMark):
        return f'<line x1="{mark.x0:.2f}" y1="{mark.y0:.2f}" x2="{mark.x1:.2f}" y2="{mark.y1:.2f}" stroke="{INK}"/>'
    if isinstance(mark, RectMark):
        place = f'x="{mark.left:.2f}" y="{mark.top:.2f}" width="{mark.width:.2f}" height="{mark.height:.2f}"'
        edge = f' stroke="{INK}" stroke-width="0.5"' if mark.outline else ""
        tip = f"><title>{escape(mark.tip, quote=False)}</title></rect>" if mark.tip else "/>"
        return f'<rect {place} fill="{mark.fill}"{edge}{tip}'
    bold = ' font-weight="bold"' if mark.bold else ""
    turned = f' transform="rotate(-90 {mark.x:.2f} {mark.y:.2f})"' if mark.turned else ""
    place = f'x="{mark.x:.2f}" y="{mark.y:.2f}" font-size="{mark.size}" text-anchor="{mark.anchor}"'
    return f"<text {place}{bold}{turned}>{escape(mark.words, quote=False)}</text>"


def span(words: str, size: float, bold: bool = False) -> float:
    """How wide letters are in DejaVu Sans, the widest of the fonts (rounded up, in classes of letters)."""
    wide = sum(
        0.42 if letter in _NARROW else 1.0 if letter in _WIDE else 0.7 if letter.isupper() else 0.64 for letter in words
    )
    return wide * size * (1.1 if bold else 1)


def wrapped(words: str, size: int, width: float, bold: bool = False) -> list[str]:
    """Lines no wider than `width` where words allow it; a longer word is cut."""
    lines: list[str] = []
    for word in words.split():
        if lines and span(f"{lines[-1]} {word}", size, bold) <= width:
            lines[-1] += f" {word}"
            continue
        lines.append("")
        for letter in word:
            if span(lines[-1] + letter, size, bold) > width:
                lines.append("")
            lines[-1] += letter
    return lines


def _apart(ticks: Ticks, length: float, size: Callable[[str], float]) -> Ticks:
    """Every n-th tick, n the smallest that keeps words of that size from touching on an axis of that length."""
    for every in range(1, len(ticks)):
        some = ticks[::every]
        if all((b[0] - a[0]) * length >= (size(a[1]) + size(b[1])) / 2 for a, b in pairwise(some)):
            return some
    return ticks[:1]


def _widest(ticks: Ticks) -> float:
    return max((span(words, SIZE) for _, words in ticks), default=0.0)


def room_left(ticks: Ticks) -> float:
    """How many pixels a vertical axis with a label takes."""
    return 6 + _widest(ticks) + GAP + SIZE + GAP


def number_ticks(high: float, count: int = 8) -> list[tuple[float, str]]:
    """About `count` even numbers from 0 to `high`: steps of 1, 2 or 5 times a power of ten."""
    least = high / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    return [(i * step / high, f"{i * step:.6g}") for i in range(int(high / step * 1.0001) + 1)]


def diverging(share: float) -> str:
    """Blue at 0, almost white at 1/2, red at 1."""
    place = min(1.0, max(0.0, share)) * (len(_RD_BU) - 1)
    below = min(int(place), len(_RD_BU) - 2)
    return mixed(_RD_BU[below], _RD_BU[below + 1], place - below)


def mixed(one: str, other: str, share: float) -> str:
    """A colour `share` of the way from one to the other."""
    pairs = ((int(one[at : at + 2], 16), int(other[at : at + 2], 16)) for at in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)
