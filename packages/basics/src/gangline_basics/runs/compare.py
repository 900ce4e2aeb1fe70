"""Comparison of runs, `gangline compare`: differing options, and curves side by side, as text and as a figure."""

from __future__ import annotations

import argparse
import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gangline.cli import open_console
from gangline.errors import escape_controls
from gangline.record import to_plain
from gangline.run.directory import RunDirectory
from gangline_basics.figure import add_legend, make_subplots, use_integer_ticks, use_style, write_figure
from gangline_basics.runs.curves import Curve, draw_curve, read_curve
from gangline_basics.runs.run_figure import run_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = 12  # maximum number of rows in the table of curves
ASIDE = ("run.dir", "run.name")  # options that differ between any two runs, and are not compared


def main(argv: Sequence[str]) -> int:
    """Print differing options and curves; write the figure. Raises UserError if a file cannot be read or written.

    The figure of one run shows training loss, validation loss and learning rate, unless a metric is named.
    """
    parser = argparse.ArgumentParser(
        prog="gangline compare",
        description="Compare the options and curves of runs, or print the curve of one run.",
    )
    parser.add_argument("runs", nargs="+", metavar="RUN_DIR", help="run directories")
    parser.add_argument("--metric", help="metric of metrics.jsonl (default: loss)")
    parser.add_argument(
        "--over", choices=("step", "tokens", "hours"), default="step", help="x axis of the curves (default: step)"
    )
    parser.add_argument("--picture", metavar="FILE", help="also write a figure of the curves to FILE.svg or FILE.png")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for scripts")
    options = parser.parse_args(list(argv))
    alone, metric = len(options.runs) == 1, options.metric or "loss"
    names = shorten_names(options.runs)
    different = find_differences([RunDirectory.open(path).read_content() for path in options.runs])
    curves = [read_curve(path, metric, options.over) for path in options.runs]
    if options.picture:
        whole = alone and options.metric is None
        figure = (
            run_figure(options.runs[0], options.over) if whole else draw_picture(names, curves, metric, options.over)
        )
        write_figure(figure, options.picture, "--picture", (".svg", ".png"))
    if options.json:
        print(json.dumps(to_plain({"runs": options.runs, "options": different, metric: curves}), allow_nan=False))
        return 0
    if not alone:
        _print_differences(names, different)
    _print_curves(names, curves, metric, options.over)
    if options.picture:
        print(f"\n{options.picture}")
    return 0


def find_differences(contents: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return option -> its values in the runs, for options that differ; None for a run without the option."""
    flat = [flatten_options(content) for content in contents]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    values = {key: [each.get(key) for each in flat] for key in keys if key not in ASIDE}
    return {key: row for key, row in values.items() if any(value != row[0] for value in row)}


@use_style()
def draw_picture(names: Sequence[str], curves: Sequence[Curve], metric: str, over: str) -> Figure:
    """Return a figure with all curves in one plot."""
    labels = [textwrap.fill(name, 30) for name in names]
    finite = any(math.isfinite(value) for points in curves for _, value in points)
    about = "" if finite else "The runs have no steps yet."
    # height in inches, so that the legend fits
    high = max(3.5, 0.19 * sum(len(label.splitlines()) for label in labels) + 0.2)
    figure, (axes,) = make_subplots(f"{metric} of {', '.join(names)}", about, [high])
    for label, points in zip(labels, curves, strict=True):
        draw_curve(axes, points, label)
    axes.set(xlabel=over, ylabel=metric)
    use_integer_ticks(*[axes.xaxis] * (over != "hours"))
    add_legend(axes)
    return figure


def _print_differences(names: Sequence[str], different: dict[str, list[Any]]) -> None:
    from rich.text import Text

    if not different:
        print("The configurations of the runs are equal.")
        return
    table = _make_table("option", names)
    for key, row in different.items():
        table.add_row(
            *(
                Text(escape_controls(cell))
                for cell in (key, *("null" if value is None else str(value) for value in row))
            )
        )
    open_console().print(table)


def _print_curves(names: Sequence[str], curves: Sequence[Curve], metric: str, over: str) -> None:
    places = sorted({x for each in curves for x, _ in each})
    if not places:
        print("\nThe runs have no steps yet.")
        return
    last = len(places) - 1
    rows = [places[round(i * last / (ROWS - 1))] for i in range(ROWS)]
    table = _make_table(over, names)
    for place in dict.fromkeys(rows):
        table.add_row(f"{place:.6g}", *(_format_at(each, place) for each in curves))
    table.add_row("best", *(_format_best(each) for each in curves))
    table.add_row("median of the last 10 %", *(_format_late(each) for each in curves))
    print(f"\n{metric}")
    open_console().print(table)


def _make_table(first: str, names: Sequence[str]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, no_wrap=True)
    for name in names:
        table.add_column(name, justify="right", overflow="fold")
    return table


def _format_at(curve: Curve, place: float) -> str:
    """Return the curve's value at its last point with x <= `place`; "" if `place` is outside of the curve's x range."""
    before = [y for x, y in curve if x <= place]
    return f"{before[-1]:.4f}" if before and place <= curve[-1][0] else ""


def _format_best(curve: Curve) -> str:
    finite = [y for _, y in curve if math.isfinite(y)]
    return f"{min(finite):.4f}" if finite else ""


def _format_late(curve: Curve) -> str:
    late = [y for _, y in curve[-max(1, len(curve) // 10) :] if math.isfinite(y)]
    return f"{median(late):.4f}" if late else ""


def shorten_names(paths: Sequence[str]) -> list[str]:
    """Return the last folder name of each path if the names differ, otherwise the paths."""
    names = [Path(path).resolve().name for path in paths]
    return names if len(set(names)) == len(names) else list(paths)


def flatten_options(content: Any, prefix: str = "") -> dict[str, Any]:
    """Return option path -> value of a configuration; the choice of a part has the path of its group."""
    flat_content: dict[str, Any] = {}
    for key, value in content.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            flat_content |= flatten_options(value, f"{path}.")
        elif value != {} or prefix:  # else the section of a part without options, which would hide its name
            flat_content[path.removeprefix("parts.")] = value
    return flat_content
