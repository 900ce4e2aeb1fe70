"""The figure of one run: training and validation loss over the learning rate."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from gangline.cli.compare import Curve, curve
from gangline.errors import UserError
from gangline.figure import PALETTE, Figure, PlotArea, number_ticks, room_left
from gangline.files import open_own

FILE = "loss.svg"
POINTS = 1000  # of a curve; a longer one is drawn as means of its neighbours
LARGEST = 200_000_000  # bytes of metrics.jsonl that the end of a run reads: seconds
LOSSES = {"loss": "training", "validation_loss": "validation"}
WIDTH = 800


def run_figure(run_dir: str | Path, over: str = "step") -> Figure:
    """Return the figure of a run from its metrics.jsonl. Raises UserError for a file that cannot be read."""
    curves = {"loss": curve(run_dir, "loss", over)}
    for metric in ("validation_loss", "learning_rate"):
        try:
            curves[metric] = curve(run_dir, metric, over)
        except UserError:  # no step has it
            continue
    curves = {metric: thin(each) for metric, each in curves.items()}
    right = max((x for each in curves.values() for x, _ in each), default=0.0) or 1.0
    figure = Figure(f"Loss of {Path(run_dir).resolve().name}", "", width=WIDTH)
    losses = [metric for metric in LOSSES if metric in curves]
    area = _plot(figure, "loss (nats)", [curves[metric] for metric in losses], right, 300)
    if len(losses) > 1:
        figure.legend(WIDTH - 220, area.top, [(PALETTE[i], LOSSES[metric]) for i, metric in enumerate(losses)])
    if "learning_rate" in curves:
        figure.line(area.left, area.bottom, area.right, area.bottom)
        area = _plot(figure, "learning rate", [curves["learning_rate"]], right, 90)
    figure.axis_below(area, over, number_ticks(right))
    return figure


def write_run_figure(run_dir: str | Path) -> Path | None:
    """Write RUN_DIR/loss.svg; None for a run without metrics.jsonl, or with one that takes long to read."""
    metrics = Path(run_dir) / "metrics.jsonl"
    if not metrics.exists() or not 0 < metrics.stat().st_size <= LARGEST:
        return None
    path = Path(run_dir) / FILE
    figure = run_figure(run_dir).svg()
    with open_own(path, "w") as file:
        file.write(figure)
    return path


def thin(each: Curve) -> Curve:
    """Return at most `POINTS` points of a curve: means of neighbours, without values that are not finite."""
    size = max(1, math.ceil(len(each) / POINTS))
    groups = (each[start : start + size] for start in range(0, len(each), size))
    return [(group[-1][0], _mean([y for _, y in group if math.isfinite(y)])) for group in groups]


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan


_LEFT = 12 + room_left([(0.0, "0.0000")])  # of all plots, so that they share the axis below


def _plot(figure: Figure, label: str, curves: Sequence[Curve], right: float, height: float) -> PlotArea:
    """Add curves with a vertical axis below what the figure has."""
    area = PlotArea(_LEFT, figure.bottom + 12, WIDTH - _LEFT - 20, height)
    finite = [y for each in curves for _, y in each if math.isfinite(y)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = low - margin, high + margin
    for number, each in enumerate(curves):
        points = [
            (area.left + x / right * area.width, area.bottom - (y - low) / (high - low) * height)
            if math.isfinite(y)
            else None
            for x, y in each
        ]
        figure.curve(points, PALETTE[number])
    figure.axis_left(area, label, even_ticks(low, high, round(height / 60) + 1))
    return area


def even_ticks(low: float, high: float, count: int) -> list[tuple[float, str]]:
    """Return about `count` multiples of 1, 2 or 5 times a power of ten between two numbers, from above to below."""
    least = (high - low) / count
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    numbers = [i * step for i in range(math.floor(high / step), math.ceil(low / step) - 1, -1)]
    return [((high - number) / (high - low), f"{number:.6g}") for number in numbers]
