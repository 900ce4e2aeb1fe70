"""events.jsonl: all events of a run except its steps, in order. Append-only, never rolled back.

A line is one JSON object with the fields

    event       one of the events below
    time        UTC, ISO 8601, to a millisecond
    monotonic   seconds on the monotonic clock of `host`: for durations between lines of the same host
    host        machine that wrote the line
    by          "rank" (global rank 0) or "launcher" (the process that starts the ranks, on the first node)
    generation  number of the start of the ranks, from 1 over all jobs of the run directory

and, in rank 0's lines once the run is built, `attempt` and `step` (number of steps done).

By the launcher (torchrun and Slurm do not write these events; under them rank 0 writes `launch`):

    launch     ranks are about to start: nodes (names, by rank), processes (number of ranks that train), spares (number
               of ranks that wait), why ("start"; "rank": a rank failed or got SIGTERM; "node": a node was lost;
               "joined": a node joined; "response": a verdict required new workers), evidence, found (time at which the
               end of the previous start was detected, as `time`, and as `found_monotonic`; null for the first start of
               a job), futile (number of starts since the last new step, including starts of earlier jobs that failed),
               member (callback or check in whose code a rank failed, if known: "health/mine"), after (in a job's first
               start: how the previous job's last start ended, a `reason` of ending.json; "killed" if no rank could
               report it; "" for a new run or a changed configuration; evidence and member then describe that start),
               config (fingerprint of the configuration)
    exit       the job is over: reason, exit_code, requeue, evidence, as in ending.json

By rank 0:

    start      processes, mesh, nodes (name of each rank's node), checks (hash of the code of each health check: a check
               that failed is used again after its code has changed)
    weights    the run begins with the weights of another run: run, checkpoint, step, sample (number of the next sample)
    phase      phase (build, restore, validate, save, recovery), at ("begin" or "end"), seconds (at the end only)
    verdict    kind, where, confidence, evidence, suggestion
    response   action, kinds, before_step, else_before, skip, rate, rate_steps, exclude, why
    end        the loop has ended: why ("done", a signal's name, "stop", "restart", "error"), evidence

A start that was killed has no `end`, and a job that was killed has no `exit`. Steps are in metrics.jsonl, each with the
`time` (seconds since the epoch) and `monotonic` of its end, and its `generation`. So each second of the job is in a
phase, in a step (`step_seconds`, and `seconds` of checkpoint, validate and callback), between a launch and its
start, or between the last step of a start and the `found` of the next launch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from gangline.pulse.write import get_current
from gangline.record import to_plain
from gangline.run.generation import Fenced, hold
from gangline.storage.files import LINES_BYTES, open_own, read_regular

FILE = "events.jsonl"


class Events:
    """Writer that appends to a run's events.jsonl; without a directory (on all ranks except rank 0) it does nothing."""

    def __init__(self, run_dir: str | Path | None, generation: int = 0, by: str = "rank") -> None:
        self._file: IO[bytes] | None = None
        self.generation = generation
        self._about = {"host": os.uname().nodename, "by": by, "generation": generation}
        self._begin = b""  # line break to write before the next line, if an incomplete line could not be ended
        self.trouble = ""  # error of the last write, until it is reported; "": none
        if run_dir is not None:
            self._run_dir = Path(run_dir)
            with suppress(FileNotFoundError):  # a refused node has deleted the directory
                self._file = open_own(Path(run_dir) / FILE, "ab+", buffering=0)
                try:
                    end_line(self._file)
                except OSError:  # a full disk
                    self._begin = b"\n"

    def write(self, event: str, **content: Any) -> None:
        """Write one line immediately."""
        if self._file is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = {"event": event, "time": now, "monotonic": time.monotonic(), **self._about}
        try:
            with hold(self._run_dir):
                text = json.dumps(to_plain({**line, **content}), allow_nan=False).encode()
                self._file.write(self._begin + text + b"\n")
                self._begin = b""
        except Fenced:  # a newer start of the run writes from now on
            return
        except OSError as error:  # such as a full disk, which must not end the run or hide another error
            self.trouble = f"cannot write a line to {FILE}: {error.strerror or error}"

    @contextmanager
    def enter_phase(self, name: str, **content: Any) -> Iterator[None]:
        """Enter a phase of the rank's pulse for the block, with a line at its start and its end, also on errors."""
        start = time.monotonic()
        self.write("phase", phase=name, at="begin", **content)
        try:
            with get_current().enter_phase(name):
                yield
        finally:
            self.write("phase", phase=name, at="end", seconds=time.monotonic() - start, **content)

    @contextmanager
    def record_error(self) -> Iterator[None]:
        """Write an "end" line if an error leaves the block, which ends the run on this rank."""
        try:
            yield
        except BaseException as error:
            self.write("end", why="error", evidence=f"{type(error).__name__}: {error}")
            raise

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_events(run_dir: str | Path) -> list[dict[str, Any]]:
    """Return every complete line, oldest first; skip incomplete lines."""
    path = Path(run_dir) / FILE
    events = []
    for line in read_regular(path, LINES_BYTES).splitlines() if path.exists() else ():
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict):
                events.append(content)
    return events


def end_line(file: IO[bytes]) -> None:
    """End an incomplete last line of an append-only file with a line break, before the next line is appended."""
    if file.seek(0, 2):
        file.seek(-1, 2)
        if file.read(1) != b"\n":
            file.write(b"\n")
