"""Figure of one run: training and validation loss above the learning rate."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING

from gangline.errors import UserError
from gangline.storage.files import open_own
from gangline_basics.figure import add_legend, make_subplots, render, use_integer_ticks, use_style
from gangline_basics.runs.curves import Curve, draw_curve, read_curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from gangline_basics.track.config import JsonLines

FILE = "loss.svg"
POINTS = 1000  # maximum number of points of a curve; a longer curve is drawn as means of consecutive points
# maximum size in bytes of a metrics.jsonl that is read at the end of a run; reading it takes seconds
LARGEST = 200_000_000


@use_style()
def run_figure(run_dir: str | Path, over: str = "step") -> Figure:
    """Return the figure of a run from its metrics.jsonl. Raises UserError for a file that cannot be read."""
    curves = {metric: thin(read_curve(run_dir, metric, over)) for metric in ("loss", "learning_rate")}
    figure, (above, below) = make_subplots(f"Loss of {Path(run_dir).resolve().name}", heights=[3.2, 1], sharex=True)
    draw_curve(above, curves["loss"], "training")
    draw_curve(below, curves["learning_rate"], "")
    with contextlib.suppress(UserError):  # no step has a validation loss
        draw_curve(above, thin(read_curve(run_dir, "validation_loss", over)), "validation")
        add_legend(above)
    above.set(ylabel="loss (nats)")
    below.set(xlabel=over, ylabel="learning rate")
    use_integer_ticks(*[below.xaxis] * (over != "hours"))
    return figure


def draw_at_end(config: JsonLines, run_dir: str | Path) -> Path | None:
    """Write RUN_DIR/loss.svg unless track.jsonl.figure=false, and return its path."""
    return write_run_figure(run_dir) if config.figure else None


def write_run_figure(run_dir: str | Path) -> Path | None:
    """Write RUN_DIR/loss.svg and return its path, or None if metrics.jsonl is missing, empty or large."""
    metrics = Path(run_dir) / "metrics.jsonl"
    if not metrics.exists() or not 0 < metrics.stat().st_size <= LARGEST:
        return None
    path = Path(run_dir) / FILE
    figure = render(run_figure(run_dir), ".svg")
    with open_own(path, "wb") as file:
        file.write(figure)
    return path


def thin(curve: Curve) -> Curve:
    """Return at most `POINTS` points of a curve: means of consecutive points, without values that are not finite."""
    size = max(1, math.ceil(len(curve) / POINTS))
    groups = (curve[start : start + size] for start in range(0, len(curve), size))
    return [(group[-1][0], _mean([y for _, y in group if math.isfinite(y)])) for group in groups]


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan
