"""Curves of a run: the main metrics, then every other metric that the run recorded."""

from __future__ import annotations

import re
from collections.abc import Iterator
from xml.etree.ElementTree import Element

from gangline_basics.runs.report.figures import render_svg
from gangline_basics.runs.report.history import History, Marks, Series
from gangline_basics.runs.report.markup import make, make_details, make_note, make_section, make_table
from gangline_basics.runs.report.plots import MOST_MARKS, describe_lines, draw_metric, format_number, select_marks

LOSSES = ("loss", "validation_loss")
MAIN = {
    "learning_rate": "learning rate",
    "grad_norm": "gradient norm (before clipping)",
    "tokens_per_second": "tokens/s",
    "mfu": "MFU (model FLOPs utilization)",
    "memory_bytes": "peak memory (bytes)",
}
MOST_FIGURES = 24  # maximum number of figures of other metrics
MOST_LINES = 7  # maximum number of lines in one figure
MOST_ROWS = 1000  # maximum number of rows in the table of all metrics


def show_curves(history: History) -> Element:
    """Return the section of curves."""
    series = history.series
    if not series:
        return make_section("Curves", make_note("No step was recorded in metrics.jsonl."))
    losses = {name: series[name] for name in series if name in LOSSES or name.startswith("validation_losses/")}
    labels = {"loss": "training", "validation_loss": "validation"}
    labelled = {labels.get(name, name.removeprefix("validation_losses/")): curve for name, curve in losses.items()}
    main = [_show_metric("loss (nats)", labelled, history.marks)]
    main += [_show_metric(title, {"": series[name]}, history.marks) for name, title in MAIN.items() if name in series]
    absent = [title for name, title in {"validation_loss": "validation loss", **MAIN}.items() if name not in series]
    others = {name: curve for name, curve in series.items() if name not in losses and name not in MAIN}
    return make_section(
        "Curves",
        _explain_marks(history.marks),
        make("div", *main, class_="figures"),
        make_note(f"Not recorded in any step: {', '.join(absent)}.") if absent else None,
        *_show_others(others, history.marks),
        _make_metric_table(series),
    )


def _show_metric(title: str, lines: dict[str, Series], marks: Marks) -> Element:
    return render_svg(draw_metric(title, lines, marks), describe_lines(lines))


def _explain_marks(marks: Marks) -> Element | None:
    """Return the sentence about the vertical lines in the figures."""
    words = []
    for name, dashes, steps in (("restart", "dashed", marks.restarts), ("rollback", "dotted", marks.rollbacks)):
        if steps:
            shown = ", ".join(map(str, select_marks(steps)))
            count = f", {MOST_MARKS} or fewer of {len(steps)}" if len(steps) > MOST_MARKS else ""
            words.append(f"{name}s ({dashes}{count}) before steps {shown}")
    return make("p", f"Vertical lines mark {' and '.join(words)}.") if words else None


def _show_others(others: dict[str, Series], marks: Marks) -> Iterator[Element]:
    """Yield the figures of all other metrics, collapsed. Metrics whose names differ only in numbers share a figure."""
    groups: dict[str, list[str]] = {}
    for name in others:
        owner, _, last = name.partition("/")
        shared = f"{owner}/" if owner in ("seconds", "rank_seconds") and last else re.sub(r"\d+", "#", name)
        groups.setdefault(shared, []).append(name)
    figures: list[Element] = []
    omitted: list[str] = []
    for shared, names in groups.items():
        if len(figures) == MOST_FIGURES:
            omitted += names
            continue
        omitted += names[MOST_LINES:]
        alone = len(names) == 1
        lines = {"" if alone else name.removeprefix(shared): others[name] for name in names[:MOST_LINES]}
        figures.append(_show_metric(names[0] if alone else shared.rstrip("/"), lines, marks))
    if figures:
        note = f"In the table below but without a curve: {', '.join(omitted)}." if omitted else ""
        what = f"{len(others)} other metrics"
        yield make_details(what, make("div", *figures, class_="figures"), make_note(note) if note else None)


def _make_metric_table(series: dict[str, Series]) -> Element:
    rows = []
    for name, curve in list(series.items())[:MOST_ROWS]:
        finite = [value for value in curve.values if abs(value) < float("inf")]
        ends = [min(finite), max(finite)] if finite else [float("nan")] * 2
        rows.append([name, f"{len(curve.values):,}", *map(format_number, (curve.values[0], curve.values[-1], *ends))])
    more = f"{len(series) - MOST_ROWS} more metrics are in metrics.jsonl." if len(series) > MOST_ROWS else ""
    table = make_table(("metric", "steps", "first", "last", "minimum", "maximum"), rows, range(1, 6))
    return make_details("All metrics as a table", table, make_note(more) if more else None)
