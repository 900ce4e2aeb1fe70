"""The step record: all that is said about one step. Trackers, health checks and the progress line read it alone."""

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
    """One applied or skipped step. Seconds are wall time on global rank 0 unless said otherwise."""

    step: int  # counts from 1: the number of steps done
    attempt: int
    loss: float  # mean over the global count of valid tokens, in nats
    grad_norm: float  # global, before clipping
    learning_rate: float
    tokens: int  # valid tokens of this step, all ranks
    tokens_per_second: float
    mfu: float | None  # model FLOPs per second over the peak of all devices
    step_seconds: float
    # By phase: data, forward_backward, optimizer, validate; checkpoint is of the save between the step before and this.
    seconds: dict[str, float] = field(default_factory=dict)
    first_sample: int = 0  # of the step's global batch: it read the samples from there on
    # Where each rank's time went since the ranks agreed on the step before: by phase (`pulse.layout.ROWS`) a list
    # by rank. Every phase is without the waits for other ranks in it, which are "collective".
    rank_phases: dict[str, list[float]] | None = None
    # Of each rank's own tokens, in nats: null of one that computes no loss. They come from different samples.
    rank_losses: list[float | None] | None = None
    # Over each rank's own work, without its waits for others: an even share of the arithmetic over the peak of one
    # device. The slowest rank's is the smallest.
    rank_mfu: list[float] | None = None
    rank_seconds: dict[str, float] | None = None  # min, median, max of step_seconds over the ranks
    memory_bytes: int = 0  # peak of this rank: device memory on a GPU, resident set on a CPU
    finite: bool = True  # false: the optimizer left everything as it was
    skipped: str = ""  # why the optimizer did not step
    validation_loss: float | None = None  # on the held-out part of the run's own data, in the steps that had one
    validation_losses: dict[str, float] = field(default_factory=dict)  # by name, of what else was validated
    metrics: dict[str, float | list[float]] = field(default_factory=dict)
    verdicts: list[dict] = field(default_factory=list)
    checkpoint: str | None = None  # the id of the checkpoint whose save begins after this step
    saved: str | None = None  # the id of the checkpoint that has become whole since the step before
    saving: float | None = None  # of the save under way, the share that is written; None: there is none
    failed_save: str | None = None  # why the newest save that has ended came to nothing, if it did
    notes: list[str] = field(default_factory=list)  # what people were told since the step before
    time: float = 0.0  # seconds since the epoch at the step's end, on global rank 0
    monotonic: float = 0.0  # the same moment on the clock of its machine, as in events.jsonl
    generation: int = 1  # which start of the ranks it is of, see gangline.run.generation

    def to_json(self) -> str:
        """One line, floats in full precision. Not finite: a string ("nan"), for JSON has no such number."""
        return json.dumps(to_plain(asdict(self)), allow_nan=False)


def list_numbers(record: StepRecord) -> dict[str, float | list[float]]:
    """The curves of one record by tag."""
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
    """The record that a line of a metrics.jsonl holds; None: it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def keep_newest(lines: Iterable[dict[str, Any] | None]) -> tuple[list[dict[str, Any]], int]:
    """(Of what the lines of a metrics.jsonl hold each step's newest record, in order; how many lines are missed.)

    The file is append-only. A step that comes again (the run went back, or was killed and went on) begins anew from
    there: what the file says before of that step and later ones no longer counts. A line without a record (None) is
    missed, unless the step behind it comes again: so one that a kill tore is not.
    """
    records: dict[int, dict[str, Any]] = {}
    gaps: list[int] = []  # of each, the step before it
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
    """`keep_newest` of a file. `report` is told of lines that are missed."""
    records, gap_count = keep_newest(_iterate_lines(path))
    _tell(path, gap_count, report)
    return records


def read_every_record(path: str | Path, report: Callable[[str], object] = warnings.warn) -> list[dict[str, Any]]:
    """The same with every record, also of steps that came again, as they were written."""
    lines = [*_iterate_lines(path)]
    _tell(path, keep_newest(lines)[1], report)
    return [record for record in lines if record is not None]


def _iterate_lines(path: str | Path) -> Iterator[dict[str, Any] | None]:
    """The record that each line of a file holds. A last one without an end may be one that a living run is writing."""
    with open_regular(path) as file:
        for line in file:
            record = record_of(line)
            if record is not None or line.endswith(b"\n"):
                yield record


def _tell(path: str | Path, missed: int, told: Callable[[str], object]) -> None:
    if missed:
        told(describe_missing(path, missed))


def describe_missing(path: str | Path, lines: int) -> str:
    """What a notice says of lines of a metrics.jsonl that are missed."""
    holds = "line of it holds" if lines == 1 else "lines of it hold"
    return f"{path} is damaged: {lines} {holds} no record of a step, and those steps are missing."


def to_plain(value: object) -> object:
    """The same as JSON has it: floats that are not finite as strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value
