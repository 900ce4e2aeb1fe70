"""Layouts by time and memory as SVG: those that none is better than in both stand out."""

from __future__ import annotations

from collections.abc import Sequence

from gangline.figure import GAP, PALE, PALETTE, Figure, PlotArea, number_ticks, room_left

WIDTH, HIGH, DOT = 960, 360, 6  # pixels

Layout = tuple[float, float, str]  # seconds of a step, gigabytes of the fullest rank, words


def front_figure(title: str, layouts: Sequence[Layout], front: Sequence[Layout], limit: float) -> Figure:
    """limit: gigabytes of an accelerator."""
    figure = Figure(title, "each dot a layout; words under the pointer", WIDTH)
    slowest, most = max(one[0] for one in (*layouts, *front)), max(limit, *(one[1] for one in (*layouts, *front)))
    rows = [(1 - at, words) for at, words in reversed(number_ticks(most))]
    left = GAP + room_left(rows)
    frame = PlotArea(left, figure.bottom + GAP, WIDTH - left - 3 * GAP, HIGH)
    for fill, group in ((PALE, layouts), (PALETTE[6], front)):
        for seconds, gigabytes, words in group:
            x = frame.left + frame.width * seconds / slowest - DOT / 2
            y = frame.bottom - frame.height * gigabytes / most - DOT / 2
            figure.rect(x, y, DOT, DOT, fill, f"{seconds:.4g} s, {gigabytes:.4g} GB: {words}", outline=True)
    y = frame.bottom - frame.height * limit / most
    figure.line(frame.left, y, frame.right, y)
    figure.axis_left(frame, "gigabytes of the fullest rank", rows)
    figure.axis_below(frame, "seconds of a step", number_ticks(slowest))
    entries = [(PALETTE[6], "none is both faster and smaller"), (PALE, "others that were looked at")]
    figure.legend(left, figure.bottom + GAP, entries)
    return figure
