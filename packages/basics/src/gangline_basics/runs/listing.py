"""Summaries of the runs in a folder, read quickly from the ends of their files. Torch-free."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline.record import keep_newest, record_of
from gangline.run import attempts, ending, events
from gangline.run.directory import RunDirectory
from gangline.run.generation import read_most_steps
from gangline.storage.files import LINES_BYTES, open_regular
from gangline_basics.runs.held import is_held

TAIL = 1 << 16  # number of bytes first read from the end of a file; more are read if they contain no result
SILENT_SECONDS = 600.0  # seconds without writes after which the state of a run on another machine is "silent"
# files that identify a run directory
MARKS = ("config.yaml", "metrics.jsonl", "events.jsonl", "parts.json", "provenance.json")
_ENDED = {"done": "done", "verdict": "stopped", "preempted": "preempted", "signal": "signal", "killed": "killed"}
STATES = ("running", "silent", *_ENDED.values(), "failed", "new", "damaged")


@dataclass(frozen=True)
class RunSummary:
    """One run as a row of the table of runs.

    state  "running", "silent" (on another machine, without a write for ten minutes), "done", "stopped" (by a
           verdict), "preempted" (saved, to be restarted), "signal" (not saved), "killed", "failed", "new" (not
           started), "damaged" (no complete config.yaml, a pipe in place of a file, or a started run without a
           readable event and without an ending)
    words  last known message: why the run ended, or its last note
    time   time of the last write, seconds since the epoch
    unreadable  number of lines without a record in the part of metrics.jsonl that was read (its end)
    """

    name: str
    directory: str
    state: str
    step: int = 0
    steps: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    words: str = ""
    time: float = 0.0
    unreadable: int = 0


def read_summaries(folder: str | Path) -> list[RunSummary]:
    """Return the summaries of all runs in a folder and its subfolders, the most recently written run last.

    If the folder itself is a run, only it is returned. Raises UserError if the folder is missing or cannot be read.
    """
    place = Path(folder)
    if not place.is_dir():
        raise UserError(
            f"the directory {folder} does not exist.", "Run directories are in runs/, unless run.dir is set."
        )
    try:
        directories = [place] if _is_run(place) else list(_iterate_runs(place, depth=2))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read: {error.strerror}.") from error
    return sorted(map(read_summary, directories), key=lambda one: (one.time, one.directory))


def read_summary(directory: Path) -> RunSummary:
    """Return the summary of a run; damaged files do not raise, but make its state "damaged"."""
    name, step, steps, unreadable, last_write = directory.name, 0, None, 0, _read_last_write(directory)
    record: dict[str, Any] = {}
    try:
        record, unreadable = _record(directory)
        step = int(record.get("step") or _count_steps(directory))
        event_tail = [event for event in _read_tail(directory / events.FILE, _parse_event) if event is not None]
        own = RunDirectory(directory).read_content().get("run") or {}
        state, words = _state(directory, record, event_tail, last_write)
        name, steps = str(own.get("name") or directory.name), own.get("steps")
    except UserError as error:
        state, words = "damaged", str(error).splitlines()[0]
    return RunSummary(
        name=name,
        directory=str(directory),
        state=state,
        step=step,
        steps=steps if isinstance(steps, int) else None,
        loss=_parse_number(record.get("loss")),
        tokens_per_second=_parse_number(record.get("tokens_per_second")),
        words=words,
        time=last_write,
        unreadable=unreadable,
    )


def _state(directory: Path, record: dict[str, Any], told: list[dict[str, Any]], written: float) -> tuple[str, str]:
    """Return (state, words) of a run."""
    words = ""
    for event in told:
        words = str(event.get("evidence") or words)
    notes = record.get("notes")
    words = str(notes[-1]) if isinstance(notes, list) and notes else words
    if is_held(directory):
        return "running", words
    end = ending.read_ending(directory)
    if end is not None:
        return _ENDED.get(end.reason, "failed"), end.evidence or end.reason
    if not told:
        return ("damaged", _describe_lost_end(directory)) if _has_started(directory, record) else ("new", "")
    if told[-1].get("host") != os.uname().nodename:
        return ("running" if time.time() - written < SILENT_SECONDS else "silent"), words
    return "killed", words or "no ending was recorded"


def _has_started(directory: Path, record: dict[str, Any]) -> bool:
    """Return whether a run's events, attempts or step records show that its ranks were started."""
    return bool(record) or any(_has_content(directory / name) for name in (events.FILE, attempts.FILE))


def _describe_lost_end(directory: Path) -> str:
    """Return the message for a started run whose end is not known, because no event of it can be read."""
    fault = "damaged" if _has_content(directory / events.FILE) else "missing or empty"
    return f"events.jsonl is {fault}, and no ending was recorded: the run was started; its end is not known"


def _has_content(path: Path) -> bool:
    with suppress(OSError):
        return path.stat().st_size > 0
    return False


def _is_run(directory: Path) -> bool:
    return any((directory / mark).exists() for mark in MARKS)


def _may_be_run(directory: Path) -> bool:
    """Return `_is_run`, or True for a folder of another user that cannot be read, so that the table lists it."""
    try:
        return _is_run(directory)
    except PermissionError:
        return True


def _iterate_runs(folder: Path, depth: int) -> Iterator[Path]:
    """Yield the run directories below a folder, including the runs of a sweep, which are one folder deeper."""
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or not path.is_dir():
            continue
        if _may_be_run(path):
            yield path
        elif depth > 1:
            with suppress(PermissionError):
                yield from _iterate_runs(path, depth - 1)


def _record(directory: Path) -> tuple[dict[str, Any], int]:
    """Return the newest complete record, or {}, and the number of unreadable lines in the part that was read."""
    records, missed_lines = keep_newest(_read_tail(directory / "metrics.jsonl", record_of))
    return (records[-1] if records else {}), missed_lines


def _parse_event(line: bytes) -> dict[str, Any] | None:
    with suppress(ValueError, RecursionError):
        content = json.loads(line)
        if isinstance(content, dict):
            return content
    return None


def _read_tail(path: Path, read: Callable[[bytes], dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Return the results of `read` for the last lines of a file, with at least one result that is not None if possible.

    A last line without a newline is omitted if its result is None, because it may be incomplete.
    """
    size = TAIL
    while True:
        try:
            with open_regular(path, sys.maxsize) as file:
                length = file.seek(0, os.SEEK_END)
                file.seek(max(0, length - size))
                lines = file.read().split(b"\n")[size < length :]
        except OSError:
            return []
        entries = [read(line) for line in lines]
        if size >= min(length, LINES_BYTES) or any(one is not None for one in entries):
            return entries if entries[-1] is not None else entries[:-1]
        size *= 8


def _read_last_write(directory: Path) -> float:
    """Return when a file that a run writes was last written."""
    last_write = 0.0
    for name in (*MARKS, ending.FILE, attempts.FILE):
        with suppress(OSError):
            last_write = max(last_write, (directory / name).stat().st_mtime)
    return last_write


def _count_steps(directory: Path) -> int:
    """Return the number of steps of a run that writes no metrics.jsonl (`track=[console]`)."""
    with suppress(OSError):
        return read_most_steps(directory)
    return 0


def _parse_number(value: Any) -> float | None:
    """Return the value as a float, also if JSON stores it as a string, such as "inf"; None if it is not a number."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
