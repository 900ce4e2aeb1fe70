"""Curves of a metric over a run's steps, tokens or hours, and their lines in a figure."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gangline.cli import make_notes
from gangline.config.suggest import suggest_near
from gangline.errors import UserError
from gangline.record import StepRecord, list_numbers, read_records

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = list[tuple[float, float]]


def read_curve(run_dir: str | Path, metric: str, over: str) -> Curve:
    """Return (x, value) for each step that has the metric. over: unit of x. Raises UserError if no step has it."""
    curve: Curve = []
    names: set[str] = set()
    lists: set[str] = set()
    tokens, began = 0, 0.0
    records = read_step_records(Path(run_dir) / "metrics.jsonl", make_notes("gangline compare"))
    for record in records:
        tokens += record.tokens
        began = began or record.time - record.step_seconds
        for name, value in list_numbers(record).items():
            if isinstance(value, list):
                lists.add(name)
                continue
            names.add(name)
            if name == metric:
                along = {"step": float(record.step), "tokens": float(tokens), "hours": (record.time - began) / 3600}
                curve.append((along[over], float(value)))
    if records and not curve:
        more = f"Metrics of the run: {', '.join(sorted(names))}."
        if metric in lists:
            raise UserError(f"{metric} is a list of numbers in every step of {run_dir}, which is not a curve.", more)
        raise UserError(
            f"the metric {metric!r} is missing in all steps of {run_dir}.", suggest_near(metric, sorted(names)), more
        )
    return curve


def read_step_records(path: Path, report: Callable[[str], object]) -> list[StepRecord]:
    """Return the records of a file; [] if it does not exist. `report` gets a note that counts unreadable lines.

    Raises UserError for a file that cannot be read, holds no record, or is of another version.
    """
    fields = StepRecord.__dataclass_fields__
    notes: list[str] = []
    try:
        lines = read_records(path, notes.append) if path.exists() else []
        records = [StepRecord(**{key: value for key, value in line.items() if key in fields}) for line in lines]
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error)) from error
    except TypeError as error:
        why = str(error).replace("StepRecord.__init__()", "a line")
        raise UserError(f"{path} was written by another version of gangline.", f"{why}.") from error
    if notes and not records:
        raise UserError(f"{path} is damaged.", "The file contains no valid step record.")
    for note in notes:
        report(note)
    return records


def draw_curve(axes: Axes, points: Curve, label: str) -> None:
    """Add a curve to a plot; values that are not finite become gaps, and up to 50 points are marked."""
    values = [value if math.isfinite(value) else math.nan for _, value in points]
    axes.plot([place for place, _ in points], values, marker="." if len(points) <= 50 else "", label=label)
