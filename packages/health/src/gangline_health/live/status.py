"""Status of a run, read from its log files and from the pulses of the ranks on this machine. Torch-free.

It only reads files that the run writes in any case, so no step waits for a reader.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline.run.directory import RunDirectory
from gangline.run.ending import RunEnding, read_ending
from gangline_health.live.follow import Follower
from gangline_health.pulses import Seen, open_readers

KEPT = 256  # maximum number of losses to keep, of the newest steps
SAID = 8  # maximum number of verdicts to keep, the newest
ROUTINE = ("monitors",)  # kinds of verdicts that are not shown

Line = dict[str, Any]


@dataclass
class Status:
    """Status of a run at one moment."""

    run_dir: Path
    name: str = ""
    steps: int | None = None  # planned number of steps of the run
    record: Line | None = None  # record of the newest step
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    checkpoint: str | None = None  # id of the newest complete checkpoint
    launches: int = 0
    why: str = ""  # reason of the newest launch
    verdicts: deque[Line] = field(default_factory=lambda: deque(maxlen=SAID))
    counted: Counter[str] = field(default_factory=Counter)  # number of verdicts by kind
    responses: Counter[str] = field(default_factory=Counter)  # number of responses by action
    ranks: list[Seen] = field(default_factory=list)  # pulses of the ranks on this machine whose process exists
    ending: RunEnding | None = None
    now: float = 0.0

    @property
    def state(self) -> str:
        """State of the run: "training", "starting", "no rank on this machine", or the reason why the run ended."""
        if self.ending is not None:
            return self.ending.reason
        if self.ranks:
            return "training" if self.record else "starting"
        return "no rank on this machine"

    @property
    def quiet_seconds(self) -> float | None:
        """Seconds since the end of the newest step; None without a step."""
        at = self.record.get("time") if self.record else None
        return None if not isinstance(at, int | float) else max(0.0, self.now - at)


class RunFollower:
    """Reader of a run's log files that keeps its status up to date. Raises UserError if the path is not a directory."""

    def __init__(self, run_dir: Path) -> None:
        if not run_dir.is_dir():
            raise UserError(
                f"{run_dir} is not a run directory.", "gangline health watch shows a running or finished run."
            )
        self.status = Status(run_dir)
        try:
            run = RunDirectory.open(str(run_dir)).run()
            self.status.name, self.status.steps = run.job.name, run.job.steps
        except (UserError, OSError, ValueError):  # the run uses parts that are not installed on this machine
            self.status.name = run_dir.name
        self._records = Follower(run_dir / "metrics.jsonl")
        self._events = Follower(run_dir / "events.jsonl")

    def look(self) -> Status:
        """Read the new lines of the log files and the pulses, and return the updated status."""
        status = self.status
        for record in self._records.read_lines():
            if isinstance(record.get("step"), int):
                self._add_record(record)
        for line in self._events.read_lines():
            self._add_event(line)
        status.ranks = sorted(list_living_ranks(status.run_dir), key=lambda seen: seen.rank)
        status.ending, status.now = read_ending(status.run_dir), time.time()
        return status

    def _add_record(self, record: Line) -> None:
        status = self.status
        if status.record is not None and record["step"] <= status.record["step"]:  # the run was rolled back
            for _ in range(min(len(status.losses), status.record["step"] - record["step"] + 1)):
                status.losses.pop()
        status.record = record
        status.losses.append(_parse_loss(record))
        status.checkpoint = record.get("saved") or status.checkpoint

    def _add_event(self, line: Line) -> None:
        status = self.status
        match line.get("event"):
            case "launch":
                status.launches, status.why = status.launches + 1, str(line.get("why", ""))
            case "verdict" if line.get("kind") not in ROUTINE:
                status.counted[str(line.get("kind"))] += 1
                status.verdicts.append(line)
            case "response":
                status.responses[str(line.get("action"))] += 1


def _parse_loss(record: Line) -> float:
    """Return the loss of a record as a float, also from "nan" and "inf"; NaN if it is missing or not a number."""
    try:
        return float(record["loss"])
    except (KeyError, TypeError, ValueError):
        return math.nan


def list_living_ranks(run_dir: Path) -> list[Seen]:
    """Return the pulses of the ranks on this machine whose process exists."""
    ranks = []
    for reader in open_readers(run_dir):
        pulse = reader.read()
        reader.close()
        if pulse.alive:
            ranks.append(pulse)
    return ranks
