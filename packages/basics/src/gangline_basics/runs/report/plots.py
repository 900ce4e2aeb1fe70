"""Figures of metrics: long curves as the range and the median of consecutive steps, with restarts and rollbacks."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from gangline.errors import escape_controls
from gangline_basics.figure import INK, add_legend, add_tip, make_subplots, use_integer_ticks, use_style
from gangline_basics.quantities import format_quantity
from gangline_basics.runs.report.figures import WIDTH
from gangline_basics.runs.report.history import Marks, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POINTS = 300  # maximum number of points of a curve that is drawn point by point
BINS = 150  # number of ranges of steps of a longer curve
MOST_MARKS = 50  # maximum number of restarts, of rollbacks and of values that are not finite that are marked
LARGEST = 1e100  # largest magnitude that is drawn; matplotlib overflows near the largest float
HEIGHT = 1.9  # height of a plot in inches


@use_style()
def draw_metric(title: str, lines: Mapping[str, Series], marks: Marks | None = None) -> Figure:
    """Return a figure of metrics over steps. A label that is empty has no entry in the legend."""
    figure, (axes,) = make_subplots(escape_controls(title), heights=[HEIGHT], width=WIDTH)
    for label, series in lines.items():
        _draw_series(axes, series, textwrap.fill(escape_controls(label), 28))
    for style, name, steps in _list_marks(marks or Marks()):
        for step in select_marks(steps):
            add_tip(axes.axvline(step - 0.5, color=INK, linestyle=style, linewidth=0.8), f"{name} before step {step}")
    axes.set(xlabel="step")
    use_integer_ticks(axes.xaxis)
    axes.locator_params("x", nbins=6)
    axes.xaxis.set_major_formatter(lambda at, _: format_tick(at))
    axes.yaxis.set_major_formatter(lambda at, _: format_tick(at))
    if any(lines):
        add_legend(axes, below=2 if len(lines) > 1 else 1)
    return figure


def reduce_series(series: Series) -> tuple[Any, Any, Any, Any] | None:
    """Return (last step, minimum, median, maximum) of each of `BINS` ranges of steps; None for a short curve.

    Values that cannot be drawn are left out; a range without a value to draw is NaN.
    """
    values = np.asarray(series.values)
    if len(values) <= POINTS:
        return None
    edges = np.linspace(0, len(values), BINS + 1).astype(int)
    table = np.full((4, BINS), np.nan)
    for number, (start, stop) in enumerate(pairwise(edges)):
        table[0, number] = series.steps[stop - 1]
        finite = values[start:stop][_is_drawable(values[start:stop])]
        if len(finite):
            table[1:, number] = finite.min(), np.median(finite), finite.max()
    return table[0], table[1], table[2], table[3]


def describe_lines(lines: Mapping[str, Series]) -> str:
    """Return the caption of a figure: all numbers of up to two curves, else the last value and the minimum of each."""
    names = ("first", "last", "minimum", "maximum") if len(lines) <= 2 else ("last", "minimum")
    captions = [f"{label}: " * bool(label) + _describe(series, names) for label, series in lines.items()]
    longest = max((len(series.values) for series in lines.values()), default=0)
    if longest > POINTS:
        captions.append(
            f"Drawn as median and range (minimum to maximum) of {BINS} intervals of about {longest / BINS:.0f} steps"
        )
    return ". ".join(captions) + "."


def _describe(series: Series, names: Sequence[str]) -> str:
    steps, values = np.asarray(series.steps), np.asarray(series.values)
    finite = np.isfinite(values)
    if not finite.any():
        return f"{len(values)} steps, without a finite value"
    low, high = np.where(finite, values, np.inf).argmin(), np.where(finite, values, -np.inf).argmax()
    places = {"first": 0, "last": -1, "minimum": int(low), "maximum": int(high)}
    ends = [(name, places[name]) for name in names]
    words = ", ".join(f"{name} {format_number(values[at])} at step {steps[at]:.0f}" for name, at in ends)
    if count := int((~finite).sum()):
        words += f"; {count} value{'s that are' if count > 1 else ' that is'} not finite, first at step"
        words += f" {steps[~finite][0]:.0f}"
    return words


def select_marks(steps: Sequence[float]) -> Sequence[float]:
    """Return at most `MOST_MARKS` of the steps, evenly spaced in the list."""
    return steps[:: max(1, math.ceil(len(steps) / MOST_MARKS))]


def format_tick(value: float) -> str:
    return format_quantity(value) if abs(value) >= 1000 else f"{value:.4g}"


def format_number(value: float) -> str:
    """Return a value as `gangline runs` and the progress lines print values: four decimals, or a metric prefix."""
    if abs(value) >= 1000:
        return format_quantity(value)
    return f"{value:.4f}" if 0.1 <= abs(value) < 100 else f"{value:.4g}"


def _list_marks(marks: Marks) -> Sequence[tuple[str, str, list[int]]]:
    return (("--", "restart", marks.restarts), (":", "rollback", marks.rollbacks))


def _draw_series(axes: Axes, series: Series, label: str) -> None:
    values = np.asarray(series.values)
    drawable = _is_drawable(values)
    condensed = reduce_series(series)
    if condensed is None:
        shown = np.where(drawable, values, np.nan)
        (line,) = axes.plot(series.steps, shown, marker="." if len(values) <= 50 else "", label=label or None)
    else:
        steps, low, middle, high = condensed
        (line,) = axes.plot(steps, middle, label=label or None)
        axes.fill_between(steps, low, high, color=line.get_color(), alpha=0.3, linewidth=0)
    broken = [number for number, drawn in enumerate(drawable) if not drawn]
    for number in select_marks(broken):
        step = series.steps[int(number)]
        (mark,) = axes.plot(step, 0.03, "x", color=line.get_color(), transform=axes.get_xaxis_transform())
        why = "too large to draw" if np.isfinite(values[int(number)]) else "not finite"
        add_tip(mark, f"{why} at step {step:.0f}")


def _is_drawable(values: Any) -> Any:
    """Return for each value whether a figure can show it: finite, and not near the largest float."""
    return np.abs(values) <= LARGEST
