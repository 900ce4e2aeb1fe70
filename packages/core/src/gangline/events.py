"""events.jsonl: what happened in a run beside its steps, in that order. Append-only, never rolled back.

A line is one JSON object. Each has `event`, `time` (UTC, ISO 8601) and `monotonic` (seconds on the clock of global rank
0's machine, for durations between lines of one start); once the run is built also `attempt` and `step` (steps done).

    start      processes, mesh
    phase      phase (build, restore, validate, save, recovery), at ("begin" or "end"; then also seconds)
    verdict    kind, where, confidence, evidence, suggestion
    order      action, kinds, before_step, skip, rate, rate_steps, exclude
    end        why ("done", a signal's name, "stop", "restart", "error"), evidence
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from gangline.record import plain

FILE = "events.jsonl"


class Events:
    """Appends to the file of a run; without a directory (every rank but the first) it writes nothing."""

    def __init__(self, run_dir: str | Path | None) -> None:
        self._file: IO[bytes] | None = None
        self.trouble = ""  # why a line could not be written, until somebody has told it
        if run_dir is not None:
            self._file = (Path(run_dir) / FILE).open("ab+", buffering=0)
            end_line(self._file)

    def write(self, event: str, **content: Any) -> None:
        """One line, at once."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"event": event, "time": now, "monotonic": time.monotonic()}
        try:
            self._file.write(json.dumps(plain({**line, **content}), allow_nan=False).encode() + b"\n")
        except OSError as error:  # a full disk ends no run, and hides no error that ends it
            self.trouble = f"{FILE} lacks a line: {error.strerror or error}"

    @contextmanager
    def phase(self, name: str, **content: Any) -> Iterator[None]:
        """A line where a phase begins and one where it ends, also by an error."""
        start = time.monotonic()
        self.write("phase", phase=name, at="begin", **content)
        try:
            yield
        finally:
            self.write("phase", phase=name, at="end", seconds=time.monotonic() - start, **content)

    @contextmanager
    def ends_with_error(self) -> Iterator[None]:
        """An error that leaves this block is the run's end on this rank."""
        try:
            yield
        except BaseException as error:
            self.write("end", why="error", evidence=f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """No line follows."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Every whole line, oldest first; what a kill tore is left out."""
    path = Path(run_dir) / FILE
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def end_line(file: IO[bytes]) -> None:
    """A line that a kill tore at the end of an append-only file stays a line of its own: what follows begins anew."""
    if file.seek(0, 2):
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
