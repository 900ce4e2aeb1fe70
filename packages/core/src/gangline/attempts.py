"""attempts.jsonl: a line for each start of a run and each way back, so that no abandoned branch is ever continued.

A run that is resumed goes on in its attempt. Going back (a rollback, a fall-back to an older checkpoint) begins
attempt n+1: first its line here, then the load.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline.checkpoint.base import CheckpointId

FILE = "attempts.jsonl"


@dataclass(frozen=True)
class Attempt:
    """One line: attempt number, the checkpoint it goes on from, samples passed over since, and why."""

    attempt: int
    start: str | None  # checkpoint id, or None for the beginning
    skipped: int = 0
    why: str = "start"
    time: str = ""


def read(run_dir: str | Path) -> list[Attempt]:
    """All lines, oldest first; a torn last line (a kill while it was written) does not count."""
    path = Path(run_dir) / FILE
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            content = json.loads(line)
            found.append(Attempt(**{key: content[key] for key in content if key in Attempt.__dataclass_fields__}))
        except (ValueError, TypeError):
            continue
    return found


def append(run_dir: str | Path, attempt: Attempt) -> None:
    """Write one line and make it durable."""
    path = Path(run_dir) / FILE
    torn = path.exists() and (content := path.read_bytes()) and not content.endswith(b"\n")
    with path.open("a") as file:
        file.write(("\n" if torn else "") + json.dumps(asdict(attempt)) + "\n")
        file.flush()
        os.fsync(file.fileno())


def current(run_dir: str | Path) -> int:
    """The number of the attempt under way; 1 where none is written yet."""
    return max((line.attempt for line in read(run_dir)), default=1)


def branch(run_dir: str | Path, ids: Iterable[CheckpointId]) -> list[CheckpointId]:
    """The checkpoints that led to where the run stands, newest first: none of an abandoned branch.

    Those of the current attempt, then those of the attempt it went back to, up to where it did, and so on.
    """
    known, lines = sorted(ids, reverse=True), read(run_dir)
    number, last = max((line.attempt for line in lines), default=1), math.inf
    found: list[CheckpointId] = []
    while True:
        found += [id for id in known if id.attempt == number and id.step <= last]
        began = next((line.start for line in lines if line.attempt == number), None)
        start = CheckpointId.parse(began) if began else None
        if start is None or start.attempt >= number:
            return found
        number, last = start.attempt, start.step


def latest(run_dir: str | Path, ids: Iterable[CheckpointId]) -> CheckpointId | None:
    """The newest checkpoint of the current attempt, else the one that the attempt started from."""
    return next(iter(branch(run_dir, ids)), None)
