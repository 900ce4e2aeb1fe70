"""Console output of a run: a progress line with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console as Terminal
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from gangline.record import StepRecord
from gangline.track import Start, Tracker
from gangline_basics.quantities import format_quantity

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.track.config import Console

LINES = 30  # approximate number of log lines in a run
COLUMNS = 80  # line width if the terminal's width is unknown
REFRESH_SECONDS = 0.25


class ConsoleTracker(Tracker):
    """Tracker that prints progress to standard output."""

    def __init__(self, every: int | None, terminal: Terminal | None = None) -> None:
        self.every = every
        self.terminal = terminal or Terminal(soft_wrap=True, highlight=False, markup=False)
        self.live: Live | None = None
        self.newest: StepRecord | None = None
        self.validated: StepRecord | None = None  # the newest record with a validation loss
        self.drawn = 0.0

    def begin(self, start: Start) -> None:
        self.first, self.final = start.first_step, start.last_step
        self.began, self.began_at = time.monotonic(), start.first_step
        self.between = self.every or max(1, (start.last_step - start.first_step) // LINES)
        again = f", attempt {start.attempt}" if start.attempt > 1 else ""
        ended = start.first_step >= start.last_step
        steps = f"at step {start.first_step}" if ended else f"steps {start.first_step + 1} to {start.last_step}"
        self._print(f"{start.name}: {steps}{again}, in {start.directory}")
        for name, text in start.describe.items():
            self._print(f"  {name:<8} {text}")
        if self.terminal.is_terminal and not is_notebook():
            self.live = Live(console=self.terminal, auto_refresh=False, transient=True)
            self.live.start()

    def record(self, record: StepRecord) -> None:
        if self.newest is not None and record.step <= self.newest.step:  # the run rewound: restart the estimate
            self.began, self.began_at = time.monotonic(), record.step
        self.newest = record
        if record.validation_loss is not None:
            self.validated = record
        worth_a_line = record.validation_loss is not None or record.checkpoint or record.saved or record.skipped
        if worth_a_line or record.step in (self.first + 1, self.final) or record.step % self.between == 0:
            self._print(self.format_line(record))
        for line in format_validation(record):
            self._print(line)
        if self.live is not None and time.monotonic() - self.drawn > REFRESH_SECONDS:
            self.live.update(self._make_progress(record), refresh=True)
            self.drawn = time.monotonic()

    def note(self, text: str) -> None:
        self._print(text)

    def end(self, summary: dict[str, Any]) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None
        for line in format_closing(summary, self.newest, self.validated):
            self._print(line)

    def format_line(self, record: StepRecord) -> str:
        """Return the log line of a step."""
        width, seconds_left = len(str(self.final)), self.estimate_seconds_left(record)
        again = ", because the last save failed" if record.failed_save else ""
        # (priority, text) in the order of the line; if the line is too long, texts with high numbers are dropped first.
        parts = [
            (0, f"step {record.step:>{width}}/{self.final}"),
            (0, f"loss {record.loss:.4f}"),
            (0, f"grad {record.grad_norm:.3g}"),
            (0, f"lr {record.learning_rate:.2e}"),
            (2, f"{format_quantity(record.tokens_per_second)} tok/s"),
            (4, f"{record.step_seconds:.3g} s"),
            (3, "" if record.mfu is None else f"mfu {100 * record.mfu:.1f}%"),
            (5, f"mem {format_quantity(record.memory_bytes)}B"),
            (0, "" if record.validation_loss is None else f"validation {record.validation_loss:.4f}"),
        ]
        events = [
            (0, f"saved {record.saved}" if record.saved else ""),
            (0, f"saving {record.checkpoint}{again}" if record.checkpoint else ""),
            (0, f"skipped: {record.skipped}" if record.skipped else ""),
        ]
        ending = (1, "" if seconds_left is None else f"left {format_duration(seconds_left)}")
        columns = self.terminal.width if self.terminal.is_terminal else COLUMNS
        line = fit_parts([*parts, *events, ending], columns)
        if len(line) <= columns:
            return line
        return f"{fit_parts([*parts, ending], columns)}\n  {fit_parts(events, columns)}"

    def estimate_seconds_left(self, record: StepRecord) -> float | None:
        """Estimate the seconds left from the mean time per step, pauses included; None before and after the run."""
        steps = record.step - self.began_at
        if steps <= 0 or record.step >= self.final:
            return None
        return (time.monotonic() - self.began) / steps * (self.final - record.step)

    def _make_progress(self, record: StepRecord) -> Table:
        seconds_left = self.estimate_seconds_left(record)
        parts = [f"step {record.step}/{self.final}", f"loss {record.loss:.4f}"]
        parts.append(f"{format_quantity(record.tokens_per_second)} tok/s")
        parts += [] if seconds_left is None else [f"left {format_duration(seconds_left)}"]
        row = Table.grid(padding=(0, 1))
        row.add_row(ProgressBar(total=self.final, completed=record.step, width=20), "  ".join(parts))
        return row

    def _print(self, text: str) -> None:
        self.terminal.print(text)


def is_notebook() -> bool:
    """Return whether the output goes to a notebook. Jupyter kernels set this variable, and pretend to be terminals.

    A notebook cannot redraw a progress line: it would store each version of the line in the output of the cell.
    """
    return "inline" in os.environ.get("MPLBACKEND", "")


def fit_parts(parts: Sequence[tuple[int, str]], columns: int) -> str:
    """Return the texts of the parts (number, text) that fit on a line, in order.

    If the line is too long, parts with high numbers are dropped first. Parts with number 0 are always kept; empty texts
    are always dropped.
    """
    places: list[int] = []
    room = columns + 2
    for number, place in sorted((number, place) for place, (number, text) in enumerate(parts) if text):
        width = len(parts[place][1]) + 2
        if number == 0 or width <= room:
            places.append(place)
            room -= width
    return "  ".join(parts[place][1] for place in sorted(places))


def format_closing(summary: dict[str, Any], newest: StepRecord | None, validated: StepRecord | None) -> list[str]:
    """Return the last lines: how the run ended, its losses, and its outputs."""
    steps, seconds = summary.get("steps", 0), summary.get("seconds", 0.0)
    why = summary.get("why", "done")
    evidence = f": {summary['evidence']}" if summary.get("evidence") else ""
    lines = [
        f"{why}{evidence}, {steps} steps in {format_duration(seconds)}, "
        f"{format_quantity(summary.get('tokens', 0))} tokens seen"
    ]
    if newest is not None:
        entropy = summary.get("unigram_entropy")
        beside = [] if entropy is None else [f"  unigram entropy of the text {entropy:.4f}"]
        held_out = ""
        if validated is not None:
            held_out = f", held-out loss {validated.validation_loss:.4f} at step {validated.step}"
        lines += [f"  loss {newest.loss:.4f} at step {newest.step}{held_out}", *beside]
        lines += [] if validated is None else format_validation(validated)
    if summary.get("failed_save"):
        lines.append(f"  the last checkpoint could not be saved: {summary['failed_save']}")
    if summary.get("checkpoint"):
        lines.append(f"  checkpoint {summary['checkpoint']}")
    if summary.get("directory"):
        lines.append(f"  {summary['directory']}")
    labels = (("figure", "figure "), ("curves", "curves: "), ("resume", "to continue: "))
    return lines + [f"  {text}{summary[name]}" for name, text in labels if summary.get(name)]


def format_validation(record: StepRecord) -> list[str]:
    """Return the losses of additional validation sets and of averaged weights, as lines of at most 80 columns."""
    losses = " ".join(f"{name}={loss:.4f}" for name, loss in record.validation_losses.items())
    return textwrap.wrap(losses, 80, initial_indent="  validation ", subsequent_indent="    ", break_long_words=False)


def format_duration(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds: 3725 -> 1:02:05."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def build(config: Console, run: Run) -> ConsoleTracker:
    """Return the tracker of lines on standard output."""
    return ConsoleTracker(config.every)
