"""Step record: loss, times and verdicts of a step, the only input of trackers, health checks and progress line."""

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
    """Record of one applied or skipped step. Seconds are wall time on global rank 0 unless stated otherwise."""

    step: int  # number of the step, from 1
    attempt: int
    loss: float  # mean loss over all valid tokens of the global batch, in nats
    grad_norm: float  # global L2 norm of the gradients before clipping
    learning_rate: float
    tokens: int  # number of valid tokens of this step, over all ranks
    tokens_per_second: float
    mfu: float | None  # model FLOPs utilization: model FLOP/s divided by the peak FLOP/s of all devices
    step_seconds: float
    # Seconds by phase: data, forward_backward, callback, optimizer, validate; sync and checkpoint of the previous step.
    seconds: dict[str, float] = field(default_factory=dict)
    first_sample: int = 0  # number of the first sample of the step's global batch
    # Seconds of each rank since the sync of the previous step: phase (`pulse.layout.ROWS`) -> list by rank. Time in
    # which a phase waits for other ranks counts as "collective" instead.
    rank_phases: dict[str, list[float]] | None = None
    # Mean loss of each rank's own tokens, in nats; null for a rank that computes no loss. Samples differ by rank.
    rank_losses: list[float | None] | None = None
    # MFU of each rank, excluding its waits for other ranks: (model FLOPs of the step / number of ranks) / busy seconds
    # / peak FLOP/s of one device. The slowest rank has the smallest MFU.
    rank_mfu: list[float] | None = None
    rank_seconds: dict[str, float] | None = None  # min, median, max over the ranks of step_seconds without the sync
    memory_bytes: int = 0  # peak memory of this rank: device memory on a GPU, resident set on a CPU
    finite: bool = True  # whether loss and gradients are finite; if false, the optimizer skipped the step
    skipped: str = ""  # reason for skipping the update; "": the optimizer updated the weights
    validation_loss: float | None = None  # loss on the held-out part of the run's data, in steps with a validation
    validation_losses: dict[str, float] = field(default_factory=dict)  # by name of the extra set or callback weights
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    verdicts: list[dict] = field(default_factory=list)
    checkpoint: str | None = None  # id of the checkpoint whose save begins after this step
    saved: str | None = None  # id of the checkpoint completed since the previous step
    saving: float | None = None  # written fraction of the save in progress, 0 to 1; None: no save
    failed_save: str | None = None  # reason if the most recently ended save failed; None: it succeeded
    notes: list[str] = field(default_factory=list)  # notices to the user since the previous step
    time: float = 0.0  # end of the step in seconds since the epoch, on global rank 0
    monotonic: float = 0.0  # end of the step on rank 0's monotonic clock, as in events.jsonl
    generation: int = 1  # number of the start of the ranks (`gangline.run.generation`)

    def to_json(self) -> str:
        """Return the record as one line of JSON, in full precision; nan and inf are strings."""
        return json.dumps(to_plain(asdict(self)), allow_nan=False)


def list_numbers(record: StepRecord) -> dict[str, float | list[float]]:
    """Return the numbers of one record to plot as curves, by name of the curve."""
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
    """Return the record in a line of metrics.jsonl; None if the line holds no record."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def keep_newest(lines: Iterable[dict[str, Any] | None]) -> tuple[list[dict[str, Any]], int]:
    """Return (the newest record of each step of a metrics.jsonl, in order; the number of missing records).

    The file is append-only. If a step is repeated (the run rolled back, or was killed and resumed), earlier lines of
    this step and of later steps no longer count. A line without a record (None) counts as a missing record, unless the
    next step is repeated, as after a kill that truncated the line.
    """
    records: dict[int, dict[str, Any]] = {}
    gaps: list[int] = []  # last step before each line without a record
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
    """Return the newest record of each step in a file, in order. `report` gets a notice about missing records."""
    records, gap_count = keep_newest(iterate_lines(path))
    _tell(path, gap_count, report)
    return records


def iterate_lines(path: str | Path) -> Iterator[dict[str, Any] | None]:
    """Yield the record of each line, None without a record; skip an incomplete last line of a run that still writes."""
    with open_regular(path) as file:
        for line in file:
            record = record_of(line)
            if record is not None or line.endswith(b"\n"):
                yield record


def _tell(path: str | Path, missed: int, told: Callable[[str], object]) -> None:
    if missed:
        told(describe_missing(path, missed))


def describe_missing(path: str | Path, lines: int) -> str:
    """Return the notice about `lines` lines of a metrics.jsonl without a record."""
    holds = "line does" if lines == 1 else "lines do"
    return f"{path} is damaged: {lines} {holds} not contain a step record, so the records of these steps are missing."


def to_plain(value: object) -> object:
    """Return the value in types of JSON, with nan and inf as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value
