"""Curves of a metric over a run's steps, tokens or hours, and their lines in a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.cli import make_notes
from gangline.config.suggest import suggest_near
from gangline.errors import UserError
from gangline.record import StepRecord, describe_missing, iterate_lines, keep_newest, list_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class _Point:
    """One step record, reduced to what a curve of one metric needs. value: None if the step lacks the metric."""

    tokens: int
    time: float
    step_seconds: float
    value: Any
    names: tuple[str, ...]  # names of the metrics that are one number
    lists: tuple[str, ...]  # names of the metrics that are a list of numbers


def read_curve(run_dir: str | Path, metric: str, over: str) -> Curve:
    """Return (x, value) for each step that has the metric. over: unit of x. Raises UserError if no step has it."""
    curve: Curve = []
    tokens, began = 0, 0.0
    points = _read_points(Path(run_dir) / "metrics.jsonl", metric, make_notes("gangline compare"))
    for step, point in points:
        tokens += point.tokens
        began = began or point.time - point.step_seconds
        if point.value is not None:
            along = {"step": float(step), "tokens": float(tokens), "hours": (point.time - began) / 3600}
            curve.append((along[over], float(point.value)))
    if points and not curve:
        names = {name for names in {point.names for _, point in points} for name in names}
        more = f"Metrics of the run: {', '.join(sorted(names))}."
        if any(metric in lists for lists in {point.lists for _, point in points}):
            raise UserError(f"{metric} is a list of numbers in every step of {run_dir}, which is not a curve.", more)
        raise UserError(
            f"the metric {metric!r} is missing in all steps of {run_dir}.", suggest_near(metric, sorted(names)), more
        )
    return curve


def _read_points(path: Path, metric: str, report: Callable[[str], object]) -> list[tuple[int, _Point]]:
    """Return (step, point) of the newest record of each step; [] without a file. `report` gets a note about damage.

    Raises UserError for a file that cannot be read, holds no record, or is of another version.
    """
    shared_names: dict[tuple[str, ...], tuple[str, ...]] = {}
    try:
        lines = (
            line and _shorten(line, metric, shared_names) for line in (iterate_lines(path) if path.exists() else ())
        )
        newest, missing = keep_newest(lines)
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error)) from error
    points: list[tuple[int, _Point]] = []
    for line in newest:
        point = line["point"]
        if isinstance(point, TypeError):
            why = str(point).replace("StepRecord.__init__()", "a line")
            raise UserError(f"{path} was written by another version of gangline.", f"{why}.") from point
        points.append((line["step"], point))
    if missing and not points:
        raise UserError(f"{path} is damaged.", "The file contains no valid step record.")
    if missing:
        report(describe_missing(path, missing))
    return points


def _shorten(
    content: dict[str, Any], metric: str, shared_names: dict[tuple[str, ...], tuple[str, ...]]
) -> dict[str, Any]:
    """Return the step of a record and its point, or the error of a record that is of another version.

    shared_names: names of the metrics of earlier records, so that equal names are stored once.
    """
    try:
        record = StepRecord(**{key: value for key, value in content.items() if key in StepRecord.__dataclass_fields__})
    except TypeError as error:
        return {"step": content["step"], "point": error}
    numbers = list_numbers(record)
    lists = tuple(name for name, value in numbers.items() if isinstance(value, list))
    names = tuple(name for name in numbers if name not in lists)
    value = numbers[metric] if metric in names else None
    names, lists = shared_names.setdefault(names, names), shared_names.setdefault(lists, lists)
    return {"step": record.step, "point": _Point(record.tokens, record.time, record.step_seconds, value, names, lists)}


def draw_curve(axes: Axes, points: Curve, label: str) -> None:
    """Add a curve to a plot; values that are not finite become gaps, and up to 50 points are marked."""
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    axes.plot([place for place, _ in points], values, marker="." if len(points) <= 50 else "", label=label)
