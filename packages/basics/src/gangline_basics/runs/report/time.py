"""Time of a run: its ledger, if a plugin supplies one (capability `time_account`), and its attempts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING
from xml.etree.ElementTree import Element

from gangline.checkpoint.id import CheckpointId
from gangline.plugin.registry import installed
from gangline.run import attempts
from gangline.run.attempts import Attempt
from gangline_basics.figure import PALETTE, add_bars, make_subplots, use_style
from gangline_basics.runs.report.figures import WIDTH, render_svg
from gangline_basics.runs.report.history import DAMAGE, History
from gangline_basics.runs.report.markup import make, make_note, make_section, make_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CAPABILITY = "time_account"  # name of a function (run directory) -> TimeAccount


@dataclass(frozen=True)
class TimeAccount:
    """Account of a run's wall time.

    seconds  kind of time -> seconds
    goodput  share of the wall time that made progress; None: not known
    faults   rows (at, detected after, recovered after, fault)
    draw     function of the width in inches that returns a figure
    about    sentence about the source of the numbers
    """

    wall_seconds: float
    seconds: Mapping[str, float]
    draw: Callable[[float], Figure]
    goodput: float | None = None
    faults: Sequence[tuple[str, str, str, str]] = field(default_factory=tuple)
    about: str = ""


def compute_account(history: History) -> TimeAccount | None:
    """Return the account of a plugin, else the sum of the phases of all steps; None for a run without a step."""
    for offer in installed().list_offers():
        if spec := offer.part.capabilities.get(CAPABILITY):
            module, _, name = spec.partition(":")
            try:
                account: TimeAccount = getattr(importlib.import_module(module), name)(Path(history.path))
                return _drop_unknown(history, account)
            except (ImportError, *DAMAGE) as error:
                history.missing.append(f"Time account of {offer.distribution}: {' '.join(str(error).split())}")
    prefix = "seconds/"
    phases = {
        name.removeprefix(prefix): sum(value for value in series.values if isfinite(value))
        for name, series in history.series.items()
        if name.startswith(prefix)
    }
    if not history.ended:
        return None
    wall = history.ended - history.began
    seconds = {**phases, "outside of the phases": max(0.0, wall - sum(phases.values()))}
    about = "Sum of the phases of all steps (seconds in metrics.jsonl), from the first step to the last one."
    return TimeAccount(wall, seconds, lambda width: _draw_phases(seconds, width), about=about)


def _drop_unknown(history: History, account: TimeAccount) -> TimeAccount:
    """Return the account without goodput if the files that record the lost time are damaged or missing."""
    files = sorted(history.damaged & {"events.jsonl", "metrics.jsonl"})
    if not files and history.events:
        return account
    about = f"{account.about} These times are incomplete: {' and '.join(files)} damaged." if files else account.about
    return replace(account, goodput=None, about=about.strip())


def show_time(history: History, account: TimeAccount | None) -> Element:
    """Return the section of time and attempts."""
    blocks: list[Element] = []
    if account is None:
        blocks.append(make_note("No step and no event has a time yet."))
    else:
        wall = account.wall_seconds or 1.0
        rows = sorted(account.seconds.items(), key=lambda item: -item[1])
        table = [(kind, f"{seconds:.2f}", f"{seconds / wall:.1%}") for kind, seconds in rows]
        caption = "; ".join(f"{kind} {share}" for kind, _, share in table if share != "0.0%")
        blocks += [make("p", account.about)] if account.about else []
        figure = render_svg(account.draw(WIDTH), f"{format_seconds(account.wall_seconds)}: {caption}.")
        blocks.append(make("div", figure, make_table(("time", "seconds", "share"), table, (1, 2)), class_="figures"))
        if account.faults:
            blocks.append(make_table(("at", "detected after", "recovered after", "fault"), account.faults))
    return make_section("Time", *blocks, make("h3", "Attempts"), _list_attempts(history))


def format_seconds(seconds: float) -> str:
    """Return a duration as days, hours, minutes and seconds."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


@use_style()
def _draw_phases(seconds: Mapping[str, float], width: float) -> Figure:
    shown = dict(sorted(seconds.items(), key=lambda item: -item[1]))
    figure, (axes,) = make_subplots("Time by phase", heights=[0.27 * max(3, len(shown))], width=width)
    add_bars(axes, shown, (PALETTE * len(shown))[: len(shown)])
    axes.set(xlabel="seconds")
    return figure


def _list_attempts(history: History) -> Element:
    if not history.attempts:
        if attempts.FILE in history.damaged:
            return make_note("attempts.jsonl is damaged.")
        return make_note("attempts.jsonl holds no start of the run.")
    rows = [
        (
            str(line.attempt),
            line.time.replace("T", " ").replace("+00:00", " UTC"),
            _format_step(line),
            line.start or "start of the run",
            line.why + _list_effects(line),
        )
        for line in history.attempts
    ]
    return make_table(("attempt", "time", "steps done", "continues from", "why"), rows, (0, 2))


def _format_step(line: Attempt) -> str:
    """Return the steps done at the time of a line; a start of the ranks records only its checkpoint."""
    if line.step or (line.start is None and not line.action):
        return str(line.step)
    start = CheckpointId.parse(line.start or "")
    return "not recorded" if start is None else str(start.step)


def _list_effects(line: Attempt) -> str:
    """Return the effects of an attempt on data, learning rate and machines, each preceded by a semicolon."""
    words = [f"{line.skipped} samples skipped from sample {line.skipped_from}"] if line.skipped else []
    words += [f"learning rate multiplied by {line.rate:g}"] if line.rate != 1 else []
    words += [f"without {', '.join(line.exclude)}"] if line.exclude else []
    return "".join(f"; {word}" for word in words)
