"""The files of a run, read once: configuration, curves, events, attempts, provenance. Torch-free."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from gangline.errors import UserError
from gangline.run import attempts
from gangline.run.directory import RunDirectory
from gangline_basics.runs.listing import MARKS, RunSummary, read_summary
from gangline_basics.runs.report.damage import (
    StepRow,
    count_damaged_attempts,
    count_lines,
    describe_left_out,
    read_events,
    read_late_lists,
    read_steps,
)

# errors of readers on a file whose values have unexpected types
DAMAGE = (UserError, OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
NOTES = 200  # maximum number of notices that are shown
_Content = TypeVar("_Content")


@dataclass
class Series:
    """One metric over the steps that recorded it."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))


@dataclass
class Marks:
    """Steps at which a run continued: after a restart of the ranks, and after a rollback to a checkpoint."""

    restarts: list[int] = field(default_factory=list)
    rollbacks: list[int] = field(default_factory=list)


@dataclass
class History:
    """One run. missing: what its files lack, in sentences. lists: mean over the last tenth of the steps."""

    path: Path
    name: str  # name in a comparison
    summary: RunSummary
    config: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[attempts.Attempt] = field(default_factory=list)
    series: dict[str, Series] = field(default_factory=dict)
    lists: dict[str, list[float]] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    notes: list[tuple[int, str]] = field(default_factory=list)  # step, notice
    note_count: int = 0
    skipped: list[tuple[int, str]] = field(default_factory=list)  # step, reason for skipping its update
    tokens: int = 0
    step: int | None = 0  # last step; None: not known
    left_out: int = 0  # number of records of metrics.jsonl that are not valid
    damaged: set[str] = field(default_factory=set)  # names of the files with damaged lines
    began: float = 0.0  # begin of the first step in seconds since the epoch
    ended: float = 0.0  # end of the last step
    missing: list[str] = field(default_factory=list)


def read_history(path: str, name: str) -> History:
    """Read the files of a run. Raises UserError if there is no run; a damaged file is named in `missing`."""
    run_dir = Path(path)
    if not any((run_dir / mark).exists() for mark in MARKS):
        RunDirectory.open(run_dir)  # raises
    history = History(run_dir, name, read_summary(run_dir))

    def read(what: str, read_file: Callable[[], _Content], default: _Content) -> _Content:
        try:
            return read_file()
        except DAMAGE as error:
            history.missing.append(f"{what}: {' '.join(str(error).split())}")
            return default

    directory = RunDirectory(run_dir)
    history.config = read("Configuration", directory.read_content, {})
    history.provenance = read("Provenance", directory.read_provenance, {})
    no_events: tuple[list[dict[str, Any]], int] = [], -1
    history.events, lines = read("Events", lambda: read_events(run_dir), no_events)
    _note_damage(history, "events.jsonl", lines)
    history.attempts = read("Attempts", lambda: attempts.read(run_dir), [])
    _note_damage(history, "attempts.jsonl", read("Attempts", lambda: count_damaged_attempts(run_dir), -1))
    no_records: tuple[list[StepRow], list[str]] = [], []
    records, reasons = read("Steps", lambda: read_steps(run_dir, history.summary.steps), no_records)
    history.step, history.left_out = history.summary.step, len(reasons)
    if reasons:
        history.missing.append(describe_left_out(reasons))
        history.damaged.add("metrics.jsonl")
        history.step = records[-1].step if records else None
    for name, there in (("provenance.json", history.provenance), ("events.jsonl", history.events)):
        if not there and name not in history.damaged:
            history.missing.append(f"{name} is missing or empty.")
    if not records:
        what = "no valid step" if reasons else "no step yet"
        history.missing.append(f"metrics.jsonl holds {what}, so there are no curves.")
    read("Steps", lambda: _fill(history, records), None)
    return history


def _note_damage(history: History, name: str, lines: int) -> None:
    """Record the number of damaged lines of a file; -1 if the file cannot be read, which `missing` already says."""
    if lines:
        history.damaged.add(name)
    if lines > 0:
        history.missing.append(f"{count_lines(lines)} in {name}.")


def _fill(history: History, records: list[StepRow]) -> None:
    """Set the curves and numbers of a history from the records of its steps."""
    late = records[-max(1, len(records) // 10) :]
    for before, record in zip([None, *records], records, strict=False):
        history.tokens += record.tokens
        for name, value in zip(record.names, record.values, strict=True):
            if (series := history.series.get(name)) is None:
                series = history.series[name] = Series()
            series.steps.append(record.step)
            series.values.append(value)
        if before is not None and record.generation != before.generation:
            history.marks.restarts.append(record.step)
        if before is not None and record.attempt != before.attempt:
            history.marks.rollbacks.append(record.step)
        if record.skipped:
            history.skipped.append((record.step, record.skipped))
        history.notes += [(record.step, note) for note in record.notes]
    history.note_count, history.notes = len(history.notes), history.notes[:NOTES]
    rows: dict[str, list[list[float]]] = {}
    for lists in read_late_lists(history.path, late):
        for name, numbers in lists.items():
            if None not in numbers:
                rows.setdefault(name, []).append([float(number) for number in numbers])
    history.lists = {
        name: [fmean(column) for column in zip(*table, strict=True)]
        for name, table in rows.items()
        if len({len(value) for value in table}) == 1
    }
    if records:
        history.ended = records[-1].time
        history.began = records[0].time - records[0].step_seconds
