"""Starts of a run, read from its log files: launch, events, steps and exit of each start. Torch-free."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gangline.record import describe_missing, iterate_lines, keep_newest
from gangline_health.ledger.clock import Line, parse_time, set_right

FIELDS = (  # of a step record
    *("step", "time", "monotonic", "generation", "host", "event", "by", "found"),
    *("step_seconds", "first_sample", "skipped", "seconds", "rank_phases"),
)
PHASES = ("data", "forward_backward", "optimizer", "sync")


@dataclass
class RanksStart:
    """Start of the ranks (a generation), with its lines of events.jsonl and its step records, oldest first."""

    generation: int
    launch: Line | None = None
    events: list[Line] = field(default_factory=list)  # lines that global rank 0 wrote
    steps: list[Line] = field(default_factory=list)
    exit: Line | None = None

    @property
    def begin(self) -> float:
        """Time of the launch or of the first log line of this start, in seconds since the epoch."""
        return min(parse_time(line) for line in (self.launch, *self.events[:1], *self.steps[:1]) if line)

    @property
    def last(self) -> float:
        """Time of the last log line or step record of this start, in seconds since the epoch."""
        return max(parse_time(line) for line in (self.launch, *self.events[-1:], *self.steps[-1:]) if line)

    @property
    def ended(self) -> str:
        """Reason why the training loop of this start ended; "" if the start was killed."""
        return next((str(line.get("why", "")) for line in self.events if line["event"] == "end"), "")


def has_sense(line: Line) -> bool:
    """Return whether a line has a valid time and generation; a crash of the machine may leave damaged lines."""
    try:
        return math.isfinite(parse_time(line)) and int(line.get("generation", 1)) >= 0
    except (KeyError, TypeError, ValueError, OverflowError):
        return False


def read(run_dir: Path, events: Iterable[Line], report: Callable[[str], object]) -> list[RanksStart]:
    """Return every start of a run, oldest first; `report` is called with a message if step records are missing."""
    starts: dict[int, RanksStart] = {}

    def get_start(line: Line) -> RanksStart:
        number = int(line.get("generation", 1))
        return starts.setdefault(number, RanksStart(number))

    for line in set_right([*events, *_read_steps(run_dir / "metrics.jsonl", report)]):
        if "event" not in line:
            get_start(line).steps.append(line)
        elif line["event"] == "launch":
            get_start(line).launch = line
        elif line["event"] == "exit":
            get_start(line).exit = line
        elif line.get("by", "rank") == "rank":
            get_start(line).events.append(line)
    known_starts = [each for each in starts.values() if each.launch or each.events or each.steps]
    return sorted(known_starts, key=lambda each: each.generation)


def _read_steps(path: Path, report: Callable[[str], object]) -> list[Line]:
    """Return every step record of a file that has times, also all records of repeated steps; [] without a file."""
    lines = [record and _shorten(record) for record in iterate_lines(path)] if path.exists() else []
    if missing := keep_newest(lines)[1]:
        report(describe_missing(path, missing))
    return [line for line in lines if line is not None and _is_step(line)]


def _shorten(record: Line) -> Line:
    """Return the fields of a step record that a ledger needs: a long run has many records."""
    line = {name: record[name] for name in FIELDS if name in record}
    if isinstance(seconds := record.get("seconds"), dict):
        line["seconds"] = {phase: seconds[phase] for phase in PHASES if phase in seconds}
    if isinstance(phases := record.get("rank_phases"), dict):
        rows = phases.get("collective")
        if isinstance(rows, list) and set(map(type, rows)) == {float}:
            rows = [statistics.fmean(rows)]
        line["rank_phases"] = {"collective": rows}
    return line


def _is_step(line: Line) -> bool:
    if not isinstance(line.get("seconds"), dict):
        return False
    numbers = all(isinstance(line.get(name), int | float) for name in ("time", "step", "step_seconds"))
    return numbers and has_sense(line)


def find_undone(starts: Sequence[RanksStart]) -> set[int]:
    """Return the `id` of each step record that was undone: the step was repeated later, or its update was skipped."""
    undone_ids: set[int] = set()
    standing: list[Line] = []
    for each in starts:
        for record in each.steps:
            while standing and standing[-1]["step"] >= record["step"]:
                undone_ids.add(id(standing.pop()))
            standing.append(record)
            if record.get("skipped"):
                undone_ids.add(id(record))
    return undone_ids
