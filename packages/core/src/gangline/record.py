"""The step record: loss, times and verdicts of a step, the only input of trackers, health checks and progress line."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gangline.storage.files import open_regular


@dataclass
class StepRecord:
    """Record of one applied or skipped step. Seconds are wall time on global rank 0 unless said otherwise."""

    step: int  # number of the step, from 1: the number of steps done
    attempt: int
    loss: float  # mean over the global count of valid tokens, in nats
    grad_norm: float  # global gradient norm before clipping, over all ranks
    learning_rate: float
    tokens: int  # valid tokens of this step, all ranks
    tokens_per_second: float
    mfu: float | None  # model FLOPs per second over the peak of all devices
    step_seconds: float
    # By phase: data, forward_backward, optimizer, validate; checkpoint: the save between the previous step and this.
    seconds: dict[str, float] = field(default_factory=dict)
    first_sample: int = 0  # number of the first sample of the step's global batch
    # Seconds of each rank since the sync of the previous step: phase (`pulse.layout.ROWS`) -> list by rank. Phases
    # exclude their waits for other ranks, which are in "collective".
    rank_phases: dict[str, list[float]] | None = None
    # Loss of each rank's own tokens, in nats; null for a rank that computes none. The ranks' samples differ.
    rank_losses: list[float | None] | None = None
    # MFU of each rank while it works, without waits for others: its even share of the arithmetic over the peak of
    # one device. The slowest rank has the smallest.
    rank_mfu: list[float] | None = None
    rank_seconds: dict[str, float] | None = None  # min, median, max of step_seconds over the ranks
    memory_bytes: int = 0  # peak of this rank: device memory on a GPU, resident set on a CPU
    finite: bool = True  # false: the optimizer changed nothing
    skipped: str = ""  # why the optimizer skipped the step
    validation_loss: float | None = None  # on the held-out part of the run's own data, in steps with a validation
    validation_losses: dict[str, float] = field(default_factory=dict)  # further validation sets and weights, by name
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    verdicts: list[dict] = field(default_factory=list)
    checkpoint: str | None = None  # id of the checkpoint whose save begins after this step
    saved: str | None = None  # id of the checkpoint completed since the previous step
    saving: float | None = None  # written share of the save under way, 0 to 1; None: no save
    failed_save: str | None = None  # why the last save that ended failed; None: it succeeded
    notes: list[str] = field(default_factory=list)  # notices to the user since the previous step
    time: float = 0.0  # seconds since the epoch at the step's end, on global rank 0
    monotonic: float = 0.0  # the step's end on the clock of its machine, as in events.jsonl
    generation: int = 1  # number of the start of the ranks, see gangline.run.generation

    def to_json(self) -> str:
        """Return the record as a line of JSON, with full precision, floats that are not finite as strings ("nan")."""
        return json.dumps(to_plain(asdict(self)), allow_nan=False)


def list_numbers(record: StepRecord) -> dict[str, float | list[float]]:
    """Return the points of one record on its curves, by tag."""
    numbers: dict[str, float | list[float]] = {
        "loss": record.loss,
        "grad_norm": record.grad_norm,
        "learning_rate": record.learning_rate,
        "tokens_per_second": record.tokens_per_second,
        "step_seconds": record.step_seconds,
        "memory_bytes": record.memory_bytes,
    }
    if record.mfu is not None:
        numbers["mfu"] = record.mfu
    if record.validation_loss is not None:
        numbers["validation_loss"] = record.validation_loss
    numbers |= {f"validation_losses/{name}": loss for name, loss in record.validation_losses.items()}
    numbers |= {f"seconds/{phase}": seconds for phase, seconds in record.seconds.items()}
    numbers |= {f"rank_seconds/{name}": seconds for name, seconds in (record.rank_seconds or {}).items()}
    numbers |= {f"rank_phases/{phase}": seconds for phase, seconds in (record.rank_phases or {}).items()}
    if record.rank_mfu:
        numbers["rank_mfu"] = record.rank_mfu
    return numbers | record.metrics


def record_of(line: str | bytes) -> dict[str, Any] | None:
    """Return the record in a line of a metrics.jsonl; None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def keep_newest(lines: Iterable[dict[str, Any] | None]) -> tuple[list[dict[str, Any]], int]:
    """Return (the newest record of each step of a metrics.jsonl, in order; the number of missed lines).

    The file is append-only. If a step comes again (the run rolled back, or was killed and resumed), earlier lines of
    that step and of later steps no longer count. A line without a record (None) is missed, unless the step after it
    comes again, as after a line that a kill tore.
    """
    records: dict[int, dict[str, Any]] = {}
    gaps: list[int] = []  # step before each missed line
    for record in lines:
        last = next(reversed(records), 0)
        if record is None:
            gaps.append(last)
            continue
        while records and next(reversed(records)) >= record["step"]:
            records.popitem()
        while gaps and gaps[-1] + 1 >= record["step"]:
            gaps.pop()
        records[record["step"]] = record
    return list(records.values()), len(gaps)


def read_records(path: str | Path, report: Callable[[str], object] = warnings.warn) -> list[dict[str, Any]]:
    """Return the newest record of each step in a file, in order. `report` gets a notice if lines are missed."""
    records, gap_count = keep_newest(_iterate_lines(path))
    _tell(path, gap_count, report)
    return records


def read_every_record(path: str | Path, report: Callable[[str], object] = warnings.warn) -> list[dict[str, Any]]:
    """Return every record of a file as written, also of steps that came again. `report` as in `read_records`."""
    lines = [*_iterate_lines(path)]
    _tell(path, keep_newest(lines)[1], report)
    return [record for record in lines if record is not None]


def _iterate_lines(path: str | Path) -> Iterator[dict[str, Any] | None]:
    """Yield each line's record, None if it has none; skip a torn last line, which a live run may be writing."""
    with open_regular(path) as file:
        for line in file:
            record = record_of(line)
            if record is not None or line.endswith(b"\n"):
                yield record


def _tell(path: str | Path, missed: int, told: Callable[[str], object]) -> None:
    if missed:
        told(describe_missing(path, missed))


def describe_missing(path: str | Path, lines: int) -> str:
    """Return the notice about lines of a metrics.jsonl that hold no record."""
    holds = "line of it holds" if lines == 1 else "lines of it hold"
    return f"{path} is damaged: {lines} {holds} no record of a step, and those steps are missing."


def to_plain(value: object) -> object:
    """Return the value as JSON has it, with floats that are not finite as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value
