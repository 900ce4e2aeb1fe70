"""Head of a report: the state of the run in numbers, what ended it, and the command that continues it."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from math import isfinite
from statistics import median
from xml.etree.ElementTree import Element

from gangline.checkpoint.id import CheckpointId
from gangline.run import attempts
from gangline.run.directory import RunDirectory
from gangline_basics.quantities import format_quantity
from gangline_basics.runs.report.history import History, Series
from gangline_basics.runs.report.markup import Child, make, make_facts
from gangline_basics.runs.report.plots import format_number
from gangline_basics.runs.report.time import TimeAccount, format_seconds
from gangline_basics.runs.report.verdicts import describe_incident, list_failures

RUNNING = ("running", "silent")


def show_head(history: History, account: TimeAccount | None) -> Element:
    """Return the header of the page of one run."""
    summary = history.summary
    failure = next((incident for incident in list_failures(history) if not incident.warns), None)
    command = format_command(history)
    return make(
        "header",
        make("p", "gangline report", class_="kicker"),
        make("h1", summary.name, " ", make("span", summary.state, class_=f"state {summary.state}")),
        make("p", str(history.path), class_="path"),
        make("p", make("b", "Ended: " if summary.state not in RUNNING else "Last message: "), summary.words)
        if summary.words
        else None,
        make("p", make("b", "First failure: "), describe_incident(failure)) if failure else None,
        make_facts(list_facts(history, account)),
        make("p", make("b", "To continue: "), make("code", command)) if command else None,
        *(make("p", text, class_="note") for text in history.missing),
    )


def list_facts(history: History, account: TimeAccount | None) -> list[tuple[str, Child]]:
    """Return the main numbers of a run, as (name, value); "not recorded" for a number that the files lack."""
    series = history.series
    steps = history.summary.steps
    step = "not known" if history.step is None else f"{history.step}" + ("" if steps is None else f" of {steps}")
    validation = series.get("validation_loss")
    wall = account.wall_seconds if account else 0.0
    return [
        ("last step", step),
        ("training loss", _format_last(series.get("loss"))),
        ("best training loss", format_best(series.get("loss"))),
        ("validation loss", _format_last(validation)),
        ("best validation loss", format_best(validation)),
        ("tokens", _format_tokens(history)),
        ("tokens/s in the last 10 % of steps", format_late(series.get("tokens_per_second"))),
        ("MFU in the last 10 % of steps", format_late(series.get("mfu"), "%")),
        ("peak memory of rank 0", _format_memory(series.get("memory_bytes"))),
        ("wall time", format_seconds(wall) if wall else "not recorded"),
        ("goodput", "not known" if account is None or account.goodput is None else f"{account.goodput:.1%}"),
        ("last record", format_time(history.ended) if history.ended else "none"),
    ]


def format_command(history: History) -> str:
    """Return the command that continues a run, or starts it again without a checkpoint.

    Return "" for a running run, and for a run that `train resume=` refuses because of a damaged file.
    """
    place = shlex.quote(str(history.path))
    if history.summary.state in RUNNING or not history.config or attempts.FILE in history.damaged:
        return ""
    try:
        names = [entry.name for entry in RunDirectory(history.path).checkpoints.iterdir()]
    except OSError:
        names = []
    ids = [id for name in names if (id := CheckpointId.parse(name))]
    if not ids:
        return f"train from={place}"
    newest = attempts.find_latest(history.path, ids)
    steps, done = history.summary.steps or 0, newest.step if newest else 0
    if history.summary.state != "done" and (not steps or done < steps):
        return f"train resume={place}"
    return f"train resume={place} run.steps={2 * max(done, steps, history.step or 0)}"


def format_best(series: Series | None) -> str:
    """Return the minimum of a curve with its step."""
    if series is None:
        return "not recorded"
    finite = [(value, step) for step, value in zip(series.steps, series.values, strict=True) if isfinite(value)]
    return f"{format_number(min(finite)[0])} at step {min(finite)[1]:.0f}" if finite else "no finite value"


def format_late(series: Series | None, unit: str = "") -> str:
    """Return the median of the last tenth of a curve. unit: "%" for a share."""
    if series is None:
        return "not recorded"
    finite = [value for value in series.values[-max(1, len(series.values) // 10) :] if isfinite(value)]
    if not finite:
        return "no finite value"
    return f"{median(finite):.2%}" if unit == "%" else format_number(median(finite))


def format_time(seconds: float) -> str:
    """Return a time in seconds since the epoch as UTC, to a second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _format_last(series: Series | None) -> str:
    if series is None:
        return "not recorded"
    return f"{format_number(series.values[-1])} at step {series.steps[-1]:.0f}"


def _format_tokens(history: History) -> str:
    if history.left_out and not history.tokens:
        return "not known"
    return format_quantity(history.tokens) + " (incomplete)" * bool(history.left_out)


def _format_memory(series: Series | None) -> str:
    return "not recorded" if series is None else f"{max(series.values) / 1e9:.3g} GB"
