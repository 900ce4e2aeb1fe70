"""Follower of a submitted job: prints the job's state, then its nodes' output. Torch-free."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from gangline import UserError
from gangline.launch.signals import restore_handlers
from gangline.run.ending import read_ending
from gangline.storage.files import open_regular, read_regular
from gangline_launch import job as jobs
from gangline_launch.job import FOLDER, SubmittedJob, require_job
from gangline_launch.state import JobState, Scheduler, SchedulerError

EXIT_FAILURE, EXIT_INTERRUPTED = 1, 130
LOOK_SECONDS = 0.5  # interval between two reads of the nodes' output files
ASK_SECONDS = 2.0  # initial interval between two queries of the scheduler; grows to ASK_MOST seconds
ASK_MOST = 15.0
LAST_LINES = 20  # number of earlier lines per file to show


@dataclass
class Lines:
    """Tail of the nodes' output files in RUN_DIR/launch."""

    run_dir: Path
    read: dict[Path, int] = field(default_factory=dict)  # file -> number of bytes already shown

    def skip(self, keep: int = 0) -> None:
        """Skip the existing lines of each file, except the last `keep` lines."""
        for path in self._list_files():
            content = read_regular(path, sys.maxsize)
            self.read[path] = len(content) - sum(map(len, content.splitlines(keepends=True)[-keep:] if keep else []))

    def show(self, to: TextIO) -> None:
        """Print the complete lines that are new since the last call."""
        for path in self._list_files():
            with open_regular(path, sys.maxsize) as file:
                file.seek(self.read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            if newline:
                self.read[path] = self.read.get(path, 0) + len(whole) + 1
                print(whole.decode(errors="replace"), file=to, flush=True)

    def _list_files(self) -> list[Path]:
        return sorted(Path(self.run_dir, FOLDER).glob("*.out"))


class Detached(KeyboardInterrupt):
    """Raised on a signal that ends this command, as Ctrl-C does; the job continues."""

    def __init__(self, signum: int) -> None:
        super().__init__()
        self.exit_code = 128 + signum


@contextmanager
def _detach_on_signal() -> Iterator[None]:
    """Raise Detached in the main thread on SIGTERM and SIGHUP, unless the calling program handles these signals."""
    restore_handlers()
    ends = [one for one in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) == signal.SIG_DFL]
    if threading.current_thread() is not threading.main_thread():
        ends = []
    for signum in ends:
        signal.signal(signum, _detach)
    try:
        yield
    finally:
        for signum in ends:
            signal.signal(signum, signal.SIG_DFL)


def _detach(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_DFL)  # a second request ends the process at once
    raise Detached(signum)


def _say_detached(request: KeyboardInterrupt, text: str) -> int:
    """Print that this command has detached and the job continues; return the exit code of this command."""
    with suppress(OSError):  # the terminal may be closed
        print(f"\ntrain: detached; {text}", flush=True)
    return request.exit_code if isinstance(request, Detached) else EXIT_INTERRUPTED


@_detach_on_signal()
def follow(run_dir: Path, scheduler: Scheduler, shown: Path, begun: bool = False) -> int:
    """Follow the run's newest job to its end; return the exit code of the run.

    shown  the run directory as the user typed it
    begun  true if the job may have printed lines already: the last LAST_LINES of each file are shown
    Ctrl-C, SIGTERM and SIGHUP end only this command. Raises UserError if the job can never start or was ended
    by a user's mistake.
    """
    lines = Lines(run_dir)
    lines.skip(LAST_LINES if begun else 0)
    last_line, ask_time, wait = "", 0.0, ASK_SECONDS
    state: JobState | None = None
    errors: set[str] = set()
    try:
        while True:
            job = require_job(run_dir)
            if time.monotonic() - ask_time >= wait or state is None:
                state = _get_state(scheduler, job, errors) or state
                ask_time, wait = time.monotonic(), min(ASK_MOST, wait * 1.1)
            if state is not None:
                if (line := f"train: job {job.id}: {state.describe()}") != last_line:
                    print(line, flush=True)
                    last_line, wait = line, ASK_SECONDS
                if state.hopeless and begun:
                    end = f"gangline launch cancel {jobs.quote_path(shown)}"
                    raise UserError(
                        f"job {job.id} can never start: {state.why}.", state.hopeless, f"To cancel the job:  {end}"
                    )
                if state.hopeless and _cancel(scheduler, job):
                    raise UserError(
                        f"job {job.id} can never start: {state.why}. The job was cancelled.", state.hopeless
                    )
            lines.show(sys.stdout)
            if state is not None and state.over and job == require_job(run_dir):
                return report_end(run_dir, state, shown)
            time.sleep(LOOK_SECONDS)
    except KeyboardInterrupt as request:
        return _say_detached(
            request,
            f"job {require_job(run_dir).id} continues.\n"
            f"  To follow the job again:  gangline launch attach {jobs.quote_path(shown)}\n"
            f"  To cancel the job:  gangline launch cancel {jobs.quote_path(shown)}",
        )


@_detach_on_signal()
def follow_all(run_dirs: Sequence[Path], scheduler: Scheduler) -> list[int]:
    """Follow the jobs of a sweep to their ends, print a line per change of state; return each run's exit code."""
    last_lines: dict[Path, str] = {}
    codes: dict[Path, int] = {}
    errors: set[str] = set()
    try:
        while len(codes) < len(run_dirs):
            for run_dir in run_dirs:
                job = require_job(run_dir)
                if (state := _get_state(scheduler, job, errors)) is None:
                    continue
                if (line := f"train: {run_dir.name}: {state.describe()}") != last_lines.get(run_dir):
                    print(line, flush=True)
                    last_lines[run_dir] = line
                if state.over and run_dir not in codes and job == require_job(run_dir):
                    codes[run_dir] = _report_exit_code(run_dir, state)
            time.sleep(ASK_SECONDS)
    except KeyboardInterrupt as request:
        code = _say_detached(
            request, "the jobs continue.\n  For each run:  gangline launch status|attach|cancel RUN_DIR"
        )
        return [codes.get(run_dir, code) for run_dir in run_dirs]
    return [codes[run_dir] for run_dir in run_dirs]


def _get_state(scheduler: Scheduler, job: SubmittedJob, said: set[str]) -> JobState | None:
    """Return the job's state; None, with a message printed once, if the scheduler does not answer."""
    try:
        state = scheduler.get_state(job)
    except SchedulerError as error:
        if str(error) not in said:
            print(f"train: {error}; retrying", file=sys.stderr, flush=True)
        said.add(str(error))
        return None
    said.clear()
    return state


def _cancel(scheduler: Scheduler, job: SubmittedJob) -> bool:
    try:
        scheduler.cancel(job)
    except SchedulerError:  # retried at the next poll
        return False
    return True


def _report_exit_code(run_dir: Path, state: JobState) -> int:
    try:
        return report_end(run_dir, state, run_dir)
    except UserError as error:
        print(f"train: {run_dir.name}: {error}", file=sys.stderr)
        return error.exit_code


def report_end(run_dir: Path, state: JobState, shown: Path) -> int:
    """Print how the job ended; return the exit code of the run. Raises UserError if a mistake of the user ended it."""
    ending = read_ending(run_dir)
    if ending is not None and ending.reason == "mistake":
        what, *details = ending.evidence.splitlines()
        raise UserError(what, *details)
    if ending is not None:
        if ending.exit_code:
            print(
                f"train: {ending.reason}: {ending.evidence}\n{jobs.format_resume_hint(shown)}",
                file=sys.stderr,
            )
        return ending.exit_code
    never = "" if (run_dir / "events.jsonl").exists() else " before its ranks started"
    print(
        f"train: job ended{never}: {state.describe()}; see {shown / FOLDER}\n{jobs.format_resume_hint(shown)}",
        file=sys.stderr,
    )
    return EXIT_FAILURE
