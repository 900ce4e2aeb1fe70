"""Report of `gangline health report`: run time by category (goodput), faults, recovery, and the best save interval.

Torch-free.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from gangline import UserError
from gangline.explain.reliability import Reliability
from gangline.run.directory import RunDirectory
from gangline.run.events import read_events
from gangline_health.ledger.account import FAULTS, Bubble, continues_job, estimate_detection, generate_spans
from gangline_health.ledger.clock import sum_forward_jumps
from gangline_health.ledger.spans import Span, flatten_spans, sum_seconds
from gangline_health.ledger.starts import RanksStart, has_sense, parse_time, read

STEPS = ("compute", "data_wait", "exposed_communication", "bubble")  # kinds of time that count as progress


@dataclass(frozen=True)
class Interruption:
    """Interruption of a run: a failure or a rollback.

    at                seconds from the begin of the run to the last log line before the interruption
    found             seconds from `at` until the interruption was noticed
    named             evidence of the failure, or the kinds of verdicts that led to a rollback
    recovery_seconds  seconds from when the interruption was noticed to the end of the next step; None: no further step
    """

    kind: str  # "rank" or "node": reason of the restart; "killed"; "response": a rollback
    at: float
    found: float
    named: str
    recovery_seconds: float | None


@dataclass(frozen=True)
class Ledger:
    """Account of a run's time: the spans `parts` tile [0, wall_seconds], in seconds since the run began."""

    run_dir: str
    wall_seconds: float
    parts: list[Span]
    faults: list[Interruption]
    saves: list[float]  # seconds for which each save blocked training
    clock_forward: float = 0.0  # seconds by which clocks were set forward, or machines slept

    @property
    def seconds(self) -> dict[str, float]:
        return sum_seconds(self.parts)

    @property
    def ettr(self) -> float:
        """Effective training time ratio (arXiv 2410.21680, section 5).

        It is the time in steps that were not undone, divided by the time that was not idle.
        """
        busy_seconds = self.wall_seconds - self.seconds["idle"]
        return sum(self.seconds[kind] for kind in STEPS) / busy_seconds if busy_seconds else 0.0

    @property
    def mtbf_seconds(self) -> float | None:
        """Mean time between faults in seconds, without idle time; None without a fault."""
        return (self.wall_seconds - self.seconds["idle"]) / len(self.faults) if self.faults else None

    def compute_best_interval(self) -> dict[str, float] | None:
        """Return the Young/Daly save interval and its ETTR; None without a fault, a save or a recovery."""
        recovered = [fault.recovery_seconds for fault in self.faults if fault.recovery_seconds is not None]
        if self.mtbf_seconds is None or not self.saves or not recovered:
            return None
        model = Reliability(self.mtbf_seconds, statistics.fmean(self.saves), statistics.fmean(recovered))
        return {
            "checkpoint_seconds": model.compute_young_daly(),
            "ettr": model.compute_ettr(model.compute_young_daly()),
        }

    def to_dict(self) -> dict[str, Any]:
        recovered = [fault.recovery_seconds for fault in self.faults if fault.recovery_seconds is not None]
        recovery = {"mean": statistics.fmean(recovered), "worst": max(recovered)} if recovered else None
        return {
            "version": 1,
            "run_dir": self.run_dir,
            "wall_seconds": self.wall_seconds,
            "clock_forward_seconds": self.clock_forward,
            "seconds": self.seconds,
            "faults": [asdict(fault) for fault in self.faults],
            "ettr": self.ettr,
            "mtbf_seconds": self.mtbf_seconds,
            "recovery_seconds": recovery,
            "young_daly": self.compute_best_interval(),
        }


def build_ledger(run_dir: Path, report: Callable[[str], object] = warnings.warn) -> Ledger:
    """Build the ledger of a run, also while it runs; `report` is called with a message if step records are missing.

    Raises UserError if the run directory holds no events and no metrics.
    """
    entries = [line for line in read_events(run_dir) if isinstance(line, dict)]
    events = [line for line in entries if "event" in line and has_sense(line)]
    starts = read(run_dir, events, report)
    if not starts:
        raise UserError(
            f"{run_dir} contains neither events.jsonl nor metrics.jsonl with times.",
            "The ledger needs these log files of the run (track=[jsonl], a default, writes metrics.jsonl).",
        )
    begin = min(each.begin for each in starts)
    marks = [each.last for each in starts] + [parse_time(each.exit) for each in starts if each.exit]
    end = max(marks)
    cut = flatten_spans(generate_spans(starts, _make_bubble(run_dir)), begin, end)
    parts = [Span(part.begin - begin, part.end - begin, part.kind) for part in cut]
    saves = [float(line["seconds"]) for line in events if line.get("phase") == "save" and line.get("at") == "end"]
    lines = [line for each in starts for line in (each.launch, *each.events, *each.steps, each.exit) if line]
    every = sorted(find_faults(starts, begin), key=lambda fault: fault.at)
    return Ledger(str(run_dir), end - begin, parts, every, saves, sum_forward_jumps(lines))


def find_faults(starts: Sequence[RanksStart], begin: float) -> list[Interruption]:
    """Return the interruptions of a run: starts that failed or were killed, and responses that rolled the run back."""
    every: list[Interruption] = []
    for before, each in pairwise(starts):
        launch = each.launch or {}
        kind = str(launch.get("why", "killed"))
        if kind == "start":
            kind = "killed"
        if kind not in (*FAULTS, "killed") or kind == "joined" or (kind == "killed" and before.ended):
            continue
        detection = max(before.last, estimate_detection(each) if continues_job(each) else each.begin)
        reason = str(launch.get("evidence") or "unknown: all processes were killed")
        every.append(
            Interruption(kind, before.last - begin, detection - before.last, reason, _compute_recovery(detection, each))
        )
    for each in starts:
        for line in each.events:
            if line["event"] == "response" and line.get("action") == "roll_back":
                at = parse_time(line)
                reason = ", ".join(line.get("kinds", ()))
                every.append(Interruption("response", at - begin, 0.0, reason, _compute_recovery(at, each)))
    return every


def _compute_recovery(at: float, each: RanksStart) -> float | None:
    return next((record["time"] - at for record in each.steps if record["time"] > at), None)


def _make_bubble(run_dir: Path) -> Bubble:
    """Return a function that computes the share of the 1F1B bubble in the passes from a step's batch size and mesh."""
    try:
        batch = RunDirectory.open(str(run_dir)).run().batch
    except (UserError, OSError, ValueError):  # the run uses parts that are not installed on this machine
        return lambda start, record: 0.0

    def compute_share(start: dict[str, Any], record: dict[str, Any]) -> float:
        mesh = {str(axis): int(size) for axis, size in (start.get("mesh") or {}).items()}
        stages, width = mesh.get("pp", 1), mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)
        size = batch.get_size(int(record.get("first_sample", 0)))
        microbatches = max(1, size // (width * (batch.micro_size or 1)))
        return (stages - 1) / (microbatches + stages - 1)

    return compute_share
