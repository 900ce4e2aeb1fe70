"""attempts.jsonl: each start of a run and each return to an older checkpoint, which decide where a run resumes.

A response that changes the course without a return (a restart, a stop, a lower learning rate, an exclusion) is also a
line, so that budgets can count responses, even after a rollback. A resumed run continues in its attempt. A return (a
rollback, or a fallback to an older checkpoint) begins attempt n+1: its line is written before the load.
Each line ends with a checksum ("sum") of its other fields, and a run with a damaged line does not start
(`refuse_damage`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gangline.checkpoint.id import CheckpointId
from gangline.errors import UserError
from gangline.storage.files import LINES_BYTES, open_own, read_regular

FILE = "attempts.jsonl"
SKIPPED_IN = "passed over in "  # prefix of `why` in a line copied from the run in `run.weights`
_RETURNS = ("roll_back", "restart")
_GOES_ON = ("note", "warn", "skip")
_CHECKSUM = re.compile(rb'"sum": "[0-9a-f]{8}"')
_CUT = re.compile(rb'"sum": "[0-9a-f]{8}"\Z')  # a line whose last character was not written


@dataclass(frozen=True)
class Attempt:
    """One line: attempt number, the checkpoint that the attempt continues from, samples skipped there, and why."""

    attempt: int
    start: str | None  # checkpoint id; None: the start of the run
    skipped: int = 0  # number of skipped samples
    why: str = "start"
    time: str = ""
    skipped_from: int = 0  # number of the first skipped sample
    action: str = ""  # action of a response ("roll_back", "restart", "stop", ...); "" for a start of the run
    kinds: tuple[str, ...] = ()  # kinds of the verdicts that were answered
    step: int = 0  # number of steps done at `time`
    rate: float = 1.0  # factor of the learning rate in the `rate_steps` steps after step `rate_from`
    rate_from: int = 0
    rate_steps: int = 0
    exclude: tuple[str, ...] = ()  # names of nodes to leave out of the next start
    data: str = ""  # if the data differs from before: first sample of the new data, and both fingerprints
    instead: int = 0  # number of an attempt whose checkpoint could not be loaded; this line replaces its line


def read(run_dir: str | Path) -> list[Attempt]:
    """Return the valid lines that no later line replaces, oldest first; skip incomplete and invalid lines."""
    lines = []
    for line in _split(_read_content(run_dir))[0]:
        with suppress(ValueError, TypeError, RecursionError):
            lines.append(_parse(line))
    return list_standing(lines)


def refuse_damage(run_dir: str | Path) -> None:
    """Raise UserError if a complete line is damaged; ignore an incomplete last line, which had no effect yet."""
    path = Path(run_dir) / FILE
    for number, text in enumerate(_split(_read_content(run_dir))[0], 1):
        if not _is_complete(text):
            continue
        try:
            why = _explain_contradiction(_parse(text))
        except (ValueError, TypeError, RecursionError) as error:
            why = str(error)
        if why:
            raise UserError(
                f"{path} is damaged in line {number}: {why}.",
                "Without this line the run may resume from an abandoned checkpoint, or train on samples twice.",
                f"Restore the file from a copy, or delete the line:  sed -i {number}d {path}",
                f"To start from scratch:  train from={Path(run_dir)}",
            )


def _read_content(run_dir: str | Path) -> bytes:
    path = Path(run_dir) / FILE
    return read_regular(path, LINES_BYTES) if path.exists() else b""


def _split(content: bytes) -> tuple[list[bytes], bytes]:
    """Return (the complete lines of a file, the incomplete last line that a kill left).

    A last line with a checksum or a closing brace counts as complete; it may be damaged.
    """
    *lines, last = content.split(b"\n")
    if _CUT.search(last):
        return [*lines, last + b"}"], b""
    return ([*lines, last], b"") if _is_complete(last) else (lines, last)


def _is_complete(line: bytes) -> bool:
    """Return whether a line was written completely; it may have been damaged later."""
    return bool(_CHECKSUM.search(line)) or line.endswith(b"}")


def _parse(text: bytes) -> Attempt:
    """Parse a line. Raises ValueError, TypeError or RecursionError if the line was damaged or edited."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("the line is not a JSON object")
    if "sum" in content and content["sum"] != _compute_checksum(content):
        raise ValueError("the checksum does not match")
    content = {key: content[key] for key in content if key in Attempt.__dataclass_fields__}
    lists = {key: tuple(value) for key, value in content.items() if isinstance(value, list)}
    line = Attempt(**{**content, **lists})
    if not _makes_sense(line):
        raise ValueError("a field has the wrong type")
    return line


def _compute_checksum(content: dict[str, Any]) -> str:
    others = {key: value for key, value in content.items() if key != "sum"}
    return hashlib.blake2b(json.dumps(others, sort_keys=True).encode(), digest_size=4).hexdigest()


def _explain_contradiction(line: Attempt) -> str:
    """Return why no run can have written a line (it was edited and lost its checksum); "" if it is plausible."""
    numbers = (line.skipped, line.skipped_from, line.step, line.rate_from, line.rate_steps, line.instead, line.rate)
    start = CheckpointId.parse(line.start) if line.start else None
    if line.attempt < 1 or not all(0 <= number < math.inf for number in numbers):
        return "a number is out of range"
    if line.time and parse_time(line) is None:
        return f"the time {line.time!r} is invalid"
    if line.start and (start is None or start.attempt > line.attempt):
        return f"attempt {line.attempt} cannot start from {line.start!r}"
    if line.skipped and line.action not in _RETURNS and not line.why.startswith(SKIPPED_IN):
        return f"{line.skipped} samples are skipped without a rollback or a restart"
    return ""


def parse_time(line: Attempt) -> float | None:
    """Return the time of a line in seconds since the epoch; None if the time is invalid."""
    try:
        time = datetime.fromisoformat(line.time)
    except ValueError:
        return None
    return time.timestamp() if time.tzinfo is not None else None


def list_standing(lines: Iterable[Attempt]) -> list[Attempt]:
    """Return the lines that no later line replaces: a rollback counts once, even if it tried several checkpoints."""
    line_list = list(lines)
    replaced = {line.instead for line in line_list if line.instead}
    return [line for line in line_list if line.attempt not in replaced or line.attempt == line.instead]


def _makes_sense(line: Attempt) -> bool:
    """Return whether each field has the type that `append` writes."""
    numbers = (line.attempt, line.skipped, line.skipped_from, line.step, line.rate_from, line.rate_steps, line.instead)
    texts, lists = (line.why, line.time, line.action, line.start or "", line.data), (line.kinds, line.exclude)
    return (
        all(type(number) is int for number in numbers)
        and isinstance(line.rate, int | float)
        and all(isinstance(text, str) for text in texts)
        and all(isinstance(words, tuple) and all(isinstance(text, str) for text in words) for words in lists)
    )


def append(run_dir: str | Path, attempt: Attempt) -> None:
    """Append one line and make it durable."""
    path = Path(run_dir) / FILE
    before = _read_content(run_dir)
    content = before.removesuffix(_split(before)[1])
    end = "" if not content or content.endswith(b"\n") else "}\n" if _CUT.search(content) else "\n"  # for the last line
    stated = json.loads(json.dumps(_select_stated(attempt)))  # as `read` parses the values: lists, not tuples
    line = json.dumps({**stated, "sum": _compute_checksum(stated)}) + "\n"
    with open_own(path, "a") as file:
        if content != before:
            file.truncate(len(content))
        file.write(end + line)
        file.flush()
        os.fsync(file.fileno())


def _select_stated(attempt: Attempt) -> dict[str, Any]:
    """Return the first five fields, and each other field that differs from its default."""
    usual = {field.name: field.default for field in fields(Attempt)[5:]}
    return {key: value for key, value in asdict(attempt).items() if key not in usual or value != usual[key]}


def read_current(run_dir: str | Path) -> int:
    """Return the number of the current attempt; 1 if the file has no line yet."""
    return find_newest(read(run_dir))


def find_newest(lines: Iterable[Attempt]) -> int:
    """Return the number of the newest attempt; 1 if there is no line."""
    return max((line.attempt for line in lines), default=1)


def iterate_happened(lines: Iterable[Attempt], attempt: int, step: int) -> Iterator[Attempt]:
    """Yield the lines from before `step` of `attempt`, without responses that a resumed run will repeat.

    A resumed run repeats responses with action NOTE, WARN or SKIP at `step` or later of this attempt. A return, a
    restart and a stop always count, even if steps are repeated.
    """
    for line in lines:
        if not (line.action in _GOES_ON and line.attempt == attempt and line.step >= step):
            yield line


def stamp(seconds: float) -> str:
    """Return a time in seconds since the epoch in the format of `Attempt.time`."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")


def find_next_cursor(lines: Iterable[Attempt], cursor: int, size_at: Callable[[int], int]) -> int:
    """Return the start of the next batch of `size_at(cursor)` samples: `cursor`, or the end of skipped samples.

    A batch never contains samples that any line skips, in every later attempt and after every restart.
    """
    ranges = sorted((line.skipped_from, line.skipped_from + line.skipped) for line in lines if line.skipped)
    for first, end in ranges:
        if first < cursor + size_at(cursor) and cursor < end:
            cursor = end
    return cursor


def find_skipped_beyond(lines: Iterable[Attempt], id: CheckpointId, cursor: int) -> Attempt | None:
    """Return a line before checkpoint `id` that skips samples beyond the checkpoint's `cursor`: the line was edited.

    In an unedited file the first step after such a line reads samples past the skipped ones. None: no such line.
    """
    line_list, at = list(lines), id
    while line := next((line for line in line_list if line.attempt == at.attempt), None):
        start = CheckpointId.parse(line.start) if line.start else None
        if start is None or start.attempt >= at.attempt:
            return None
        if at.step > start.step and line.skipped_from + line.skipped > cursor and line.skipped:
            return line
        at = start
    return None


def compute_rate(lines: Iterable[Attempt], step: int) -> float:
    """Return the learning-rate factor of a step (from 1): the product of `rate` of all lines that cover the step."""
    return math.prod(line.rate for line in lines if line.rate_from < step <= line.rate_from + line.rate_steps)


def branch(run_dir: str | Path, ids: Iterable[CheckpointId]) -> list[CheckpointId]:
    """Return the checkpoints that led to the run's current state, newest first, without abandoned branches.

    Start with the checkpoints of the current attempt; continue with its parent attempt up to the checkpoint that it
    resumed from, and so on.
    """
    sorted_ids, lines = sorted(ids, reverse=True), read(run_dir)
    number, last = max((line.attempt for line in lines), default=1), math.inf
    checkpoints: list[CheckpointId] = []
    while True:
        checkpoints += [id for id in sorted_ids if id.attempt == number and id.step <= last]
        began = next((line.start for line in lines if line.attempt == number), None)
        start = CheckpointId.parse(began) if began else None
        if start is None or start.attempt >= number:
            return checkpoints
        number, last = start.attempt, start.step


def find_latest(run_dir: str | Path, ids: Iterable[CheckpointId]) -> CheckpointId | None:
    """Return the newest checkpoint of the current attempt, else the checkpoint that the attempt started from."""
    return next(iter(branch(run_dir, ids)), None)
