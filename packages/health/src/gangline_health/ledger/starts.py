"""The starts of a run as its files tell them: when each was launched, what it did, how it ended. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

Line = dict[str, Any]


@dataclass
class RanksStart:
    """One start of the ranks (a generation): its lines of events.jsonl and its steps, oldest first."""

    generation: int
    launch: Line | None = None
    events: list[Line] = field(default_factory=list)  # of global rank 0
    steps: list[Line] = field(default_factory=list)
    exit: Line | None = None

    @property
    def begin(self) -> float:
        """When it was launched, or is first heard of."""
        return min(moment(line) for line in (self.launch, *self.events[:1], *self.steps[:1]) if line)

    @property
    def last(self) -> float:
        """The last sign of life of its ranks."""
        return max(moment(line) for line in (self.launch, *self.events[-1:], *self.steps[-1:]) if line)

    @property
    def ended(self) -> str:
        """Why its loop ended, "" where it was killed."""
        return next((str(line.get("why", "")) for line in self.events if line["event"] == "end"), "")


def moment(line: Line) -> float:
    """Seconds since the epoch of a line of events.jsonl or metrics.jsonl."""
    time = line["time"]
    return float(time) if isinstance(time, int | float) else datetime.fromisoformat(time).timestamp()


def read(run_dir: Path, events: Iterable[Line]) -> list[RanksStart]:
    """Every start of which something is written, oldest first. Lines that are no record of a step are left out."""
    found: dict[int, RanksStart] = {}

    def of(line: Line) -> RanksStart:
        number = int(line.get("generation", 1))
        return found.setdefault(number, RanksStart(number))

    for line in events:
        if line["event"] == "launch":
            of(line).launch = line
        elif line["event"] == "exit":
            of(line).exit = line
        elif line.get("by", "rank") == "rank":
            of(line).events.append(line)
    path = run_dir / "metrics.jsonl"
    for text in path.read_bytes().splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except ValueError:  # a kill tore it
            continue
        if _is_step(line):
            of(line).steps.append(line)
    heard = [each for each in found.values() if each.launch or each.events or each.steps]
    return sorted(heard, key=lambda each: each.generation)


def _is_step(line: object) -> bool:
    if not isinstance(line, dict) or not isinstance(line.get("seconds"), dict):
        return False
    return (
        all(isinstance(line.get(name), int | float) for name in ("time", "step", "step_seconds")) and line["time"] > 0
    )


def undone(starts: Sequence[RanksStart]) -> set[int]:
    """The `id` of each step record that came to nothing: it comes again further down, or changed no weight."""
    lost: set[int] = set()
    standing: list[Line] = []
    for each in starts:
        for record in each.steps:
            while standing and standing[-1]["step"] >= record["step"]:
                lost.add(id(standing.pop()))
            standing.append(record)
            if record.get("skipped"):
                lost.add(id(record))
    return lost
