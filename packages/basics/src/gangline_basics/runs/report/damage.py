"""Readers of metrics.jsonl, events.jsonl and attempts.jsonl that count the lines which no run can have written."""

from __future__ import annotations

import json
import reprlib
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline.record import StepRecord, keep_newest, list_numbers
from gangline.run import attempts, events
from gangline.run.generation import read_most_steps
from gangline.storage.files import LINES_BYTES, open_regular, read_regular

# event -> its fields without which a report cannot show the event; all are texts
EVENT_FIELDS = {
    "verdict": ("kind", "where"),
    "launch": ("why",),
    "exit": ("reason",),
    "end": ("why",),
    "response": ("action",),
    "fault": ("kind",),
}
MOST_STEPS = 10**12  # steps that no run reaches
MOST_SECONDS = 1e11  # time in seconds since the epoch that no run reaches: the year 5138
_NUMBERS = ("loss", "grad_norm", "learning_rate", "tokens_per_second", "memory_bytes", "mfu", "validation_loss")
_OPTIONAL = ("mfu", "validation_loss", "rank_phases", "rank_seconds", "rank_mfu")
_COUNTS = ("attempt", "tokens", "generation")
_TIMES = ("time", "step_seconds")
_CURVES = ("seconds", "validation_losses", "rank_seconds")  # name -> number
_TABLES = ("metrics", "rank_phases")  # name -> number, or list of numbers
_FIELDS = StepRecord.__dataclass_fields__
_REQUIRED = {name for name, spec in _FIELDS.items() if spec.default is spec.default_factory}  # both are MISSING
_CHECKED = {*_NUMBERS, *_OPTIONAL, *_COUNTS, *_TIMES, *_CURVES, *_TABLES, "notes", "skipped"}
_FLOAT = {float}
_WORDS = ("nan", "inf", "-inf")  # numbers that JSON lacks, as `StepRecord.to_json` writes them


@dataclass(frozen=True, slots=True)
class StepRow:
    """Fields of one step record that a report shows, in little memory. names, values: its curves."""

    step: int
    attempt: int
    generation: int
    tokens: int
    time: float
    step_seconds: float
    skipped: str
    notes: tuple[str, ...]
    names: tuple[str, ...]
    values: array[float]
    begin: int  # offset of the record's line in metrics.jsonl, in bytes


def read_events(run_dir: Path) -> tuple[list[dict[str, Any]], int]:
    """Return (the events, oldest first; the number of damaged lines). An incomplete last line does not count."""
    contents = [_parse_object(line) for line in _iterate_complete(run_dir / events.FILE)]
    valid = [content for content in contents if content is not None and _is_event(content)]
    return valid, len(contents) - len(valid)


def count_damaged_attempts(run_dir: Path) -> int:
    """Return the number of damaged lines of attempts.jsonl. Raises UserError, as `train resume=` does."""
    attempts.refuse_damage(run_dir)
    contents = map(_parse_object, _iterate_complete(run_dir / attempts.FILE))
    return sum(content is None or "attempt" not in content for content in contents)


def read_steps(run_dir: Path, steps: int | None) -> tuple[list[StepRow], list[str]]:
    """Return (the newest valid record of each step, in order; the reason for each record that was left out).

    steps: `run.steps` of the configuration, if it is known.
    """
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return [], []
    names: dict[tuple[str, ...], tuple[str, ...]] = {}  # equal names of curves, once for all rows
    lines: list[dict[str, Any] | None] = []  # place and row of each valid record; None: a kill may have truncated it
    begin = 0
    numbers: list[int] = []  # line number of each of `lines`
    reasons: dict[int, str] = {}  # line number -> why the record was left out
    try:
        with open_regular(path) as file:
            for number, line in enumerate(file, 1):
                record = _parse_object(line)
                why = "not a JSON object" if record is None else _explain_invalid(record)
                if not why or _is_truncated(line):
                    lines.append(record and _shorten(record, begin, names))
                    numbers.append(number)
                elif line.strip():
                    reasons[number] = why
                begin += len(line)
    except OSError as error:
        raise UserError(f"{path} cannot be read.", error.strerror or str(error)) from error
    most = max(steps, read_most_steps(run_dir)) if steps else MOST_STEPS
    faults = list(_mark_order(lines, most))
    reasons |= {number: why for number, why in zip(numbers, faults, strict=True) if why}
    if lines and lines[-1] is None:  # a run that still writes
        lines, faults = lines[:-1], faults[:-1]
    newest, gaps = keep_newest(record for record, why in zip(lines, faults, strict=True) if not why)
    records = [line["row"] for line in newest]
    whys = [f"line {number}: {why}" for number, why in sorted(reasons.items())]
    return records, whys + ["a truncated line"] * gaps


def read_late_lists(run_dir: Path, rows: Iterable[StepRow]) -> Iterator[dict[str, list[Any]]]:
    """Yield the metrics of each row that are lists of numbers, by name, from the row's line of metrics.jsonl."""
    with open_regular(run_dir / "metrics.jsonl") as file:
        for row in rows:
            file.seek(row.begin)
            numbers = list_numbers(_make_record(json.loads(file.readline())))
            yield {name: value for name, value in numbers.items() if isinstance(value, list)}


def describe_left_out(reasons: list[str]) -> str:
    """Return the notice about records of metrics.jsonl that were left out."""
    records = "1 record of metrics.jsonl was" if len(reasons) == 1 else f"{len(reasons)} records of metrics.jsonl were"
    return f"{records} left out: not valid. First: {reasons[0]}."


def _make_record(content: Mapping[str, Any]) -> StepRecord:
    return StepRecord(**{key: value for key, value in content.items() if key in _FIELDS})


def _shorten(content: Mapping[str, Any], begin: int, names: dict[tuple[str, ...], tuple[str, ...]]) -> dict[str, Any]:
    """Return the fields of a valid record that order it, and its row. names: names of curves of earlier rows."""
    record = _make_record(content)
    curves = {name: float(value) for name, value in list_numbers(record).items() if not isinstance(value, list)}
    own = tuple(curves)
    row = StepRow(
        step=record.step,
        attempt=record.attempt,
        generation=record.generation,
        tokens=record.tokens,
        time=record.time,
        step_seconds=record.step_seconds,
        skipped=record.skipped,
        notes=tuple(record.notes),
        names=names.setdefault(own, own),
        values=array("d", curves.values()),
        begin=begin,
    )
    return {**{name: content[name] for name in ("step", "attempt", "generation") if name in content}, "row": row}


def count_lines(number: int) -> str:
    """Return "1 damaged line" or "2 damaged lines"."""
    return f"{number} damaged line{'s' * (number != 1)}"


def _iterate_complete(path: Path) -> Iterator[bytes]:
    """Yield each line that is not blank, without an incomplete last line."""
    *lines, last = (read_regular(path, LINES_BYTES) if path.exists() else b"").split(b"\n")
    yield from filter(bytes.strip, lines if _is_truncated(last) else [*lines, last])


def _is_truncated(line: bytes) -> bool:
    """Return whether a line is the begin of a JSON object: its end was not written yet, or a kill prevented it."""
    return line.startswith(b"{") and not line.rstrip().endswith(b"}") and _parse_object(line) is None


def _parse_object(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _is_event(content: Mapping[str, Any]) -> bool:
    names = ("event", "time", *EVENT_FIELDS.get(str(content.get("event")), ()))
    return all(isinstance(content.get(name), str) for name in names)


def _explain_invalid(record: Mapping[str, Any]) -> str:
    """Return why no run can have written a record; "" if it is valid."""
    step = record.get("step")
    if type(step) is not int or not 1 <= step <= MOST_STEPS:
        return f"step is {reprlib.repr(step)}" if "step" in record else "step is missing"
    for name in _FIELDS:
        if name in record:
            if name in _CHECKED and not _is_valid(name, record[name]):
                return f"{name} is {reprlib.repr(record[name])}"
        elif name in _REQUIRED:
            return f"{name} is missing"
    return ""


def _is_valid(name: str, value: Any) -> bool:
    """Return whether the field of a record has the type that a report needs."""
    if name in _NUMBERS and type(value) is float:  # the usual case
        return True
    if value is None and name in _OPTIONAL:
        return True
    if name in _NUMBERS:
        return _is_number(value)
    if name in _COUNTS:
        return type(value) is int and 0 <= value < 2**63
    if name in _TIMES:
        return isinstance(value, int | float) and isfinite(value) and 0 <= value < MOST_SECONDS
    if name in _CURVES:
        return isinstance(value, dict) and (_is_all_floats(value.values()) or all(map(_is_number, value.values())))
    if name in _TABLES:
        return isinstance(value, dict) and all(_is_number(entry) or _is_list(entry) for entry in value.values())
    if name == "rank_mfu":
        return _is_list(value)
    if name == "notes":
        return isinstance(value, list) and all(isinstance(note, str) for note in value)
    return isinstance(value, str) if name == "skipped" else True


def _is_number(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**1000  # as a float it is finite
    return isinstance(value, float) or value in _WORDS


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and (
        _is_all_floats(value) or all(entry is None or _is_number(entry) for entry in value)
    )


def _is_all_floats(values: Iterable[Any]) -> bool:
    """Return whether all values are floats: a quick check, which most records of a long run pass."""
    return set(map(type, values)) <= _FLOAT


def _mark_order(records: list[dict[str, Any] | None], most: int) -> Iterator[str]:
    """Yield for each record why its step is impossible at its place in the file; "" if it is plausible.

    Steps increase within one start of the ranks and one attempt. most: steps of the run, as far as they are known.
    """
    before: dict[str, Any] | None = None
    following: list[dict[str, Any] | None] = [None] * len(records)
    valid = [number for number, record in enumerate(records) if record is not None]
    for number, after in pairwise(valid):
        following[number] = records[after]
    for record, after_it in zip(records, following, strict=True):
        why = ""
        if record is not None:
            step = record["step"]
            follows = before is not None and step == before["step"] + 1
            if before is not None and _is_same_start(before, record) and step <= before["step"]:
                why = f"step {step} after step {before['step']}"
            elif not follows and step > most:
                why = f"step {step} of {most}"
            elif not follows and after_it and _is_same_start(record, after_it) and after_it["step"] <= step:
                why = f"step {step} before step {after_it['step']}"
            before = before if why else record
        yield why


def _is_same_start(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    names = ("attempt", "generation")
    return all(name in one and one.get(name) == other.get(name) for name in names)
