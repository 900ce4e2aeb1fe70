"""First failure of a start: the first rank to fail writes its reason to a file. Torch-free.

An error of a collective means that another rank has failed, and only that rank knows the cause. A rank with such an
error therefore records no failure, and waits a moment before it exits, so that the other rank exits first.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from gangline.errors import UserError
from gangline.launch.errors import RestartWanted
from gangline.launch.output import log_path
from gangline.launch.signals import name_of
from gangline.run.ending import EXIT_FAILURE, EXIT_REQUEUE, EXIT_STOPPED, RunEnding, decide_ending
from gangline.storage.files import open_regular, read_regular
from gangline_basics.launch.changed_data import describe_changed_data

PEER_WAIT_SECONDS = 1.0

_HINTS = {
    "SIGKILL": "; the system may have run out of memory",
    "SIGBUS": "; a mapped file was truncated or cannot be read, or /dev/shm or a disk is full",
}
_TAIL_BYTES = 1 << 16  # maximum number of bytes read from the end of a log


_unwritten: dict[Path, RankFailure] = {}  # failures that this process could not write, because the disk was full


@dataclass(frozen=True)
class RankFailure:
    """Reason for the end of a rank.

    kind    "user" (a user error, no traceback), "bug", "restart" (a verdict requests new workers), "ended"
            (`train_rank` returned an exit code), or "lost" (the lost rank could not write a reason)
    member  the part that raised the error, if known: "health/mine"
    """

    rank: int
    kind: str
    exit_code: int
    what: str = ""
    details: list[str] = field(default_factory=list)
    trace: str = ""
    member: str = ""

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        if isinstance(error, UserError):
            return cls(rank, "user", error.exit_code, error.what, list(error.details))
        if isinstance(error, RestartWanted):
            return cls(rank, "restart", EXIT_REQUEUE if error.requeue else EXIT_STOPPED, str(error))
        what = "".join(traceback.format_exception_only(error)).strip()
        trace, member = "".join(traceback.format_exception(error)), str(getattr(error, "raised_by", ""))
        return cls(rank, "bug", EXIT_FAILURE, what, trace=trace, member=member)

    @property
    def is_transient(self) -> bool:
        """Return whether restarted ranks may succeed: False after a user error or a verdict that stops the run."""
        return self.kind in ("bug", "restart")

    @property
    def preempted(self) -> bool:
        """Return whether the ranks saved a checkpoint and exited because a process was asked to stop."""
        return self.kind == "ended" and self.exit_code == EXIT_REQUEUE

    @property
    def evidence(self) -> str:
        """Description of the failure in one line."""
        return f"rank {self.rank} failed first: {self.what}"

    def make_ending(self, generation: int, exclude: tuple[str, ...] = ()) -> RunEnding:
        """Return the ending of a job that this failure ends."""
        text = "\n".join((self.what, *self.details))
        return decide_ending(generation, text, failure=self.kind, exit_code=self.exit_code, exclude=exclude)

    def make_error(self) -> UserError:
        """Return the user error, to be raised in the user's process."""
        error = UserError(self.what, *self.details)
        error.exit_code = self.exit_code
        return error


def claim(logs: Path, attempt: int, failure: RankFailure) -> bool:
    """Record the first failure of start number `attempt`, and return True, or False if another rank was first.

    On a full disk, only this process knows the failure.
    """
    path = _make_path(logs, attempt)
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(asdict(failure), file)
    except FileExistsError:
        return False
    except OSError:
        with suppress(OSError):
            path.unlink()
        _unwritten.setdefault(path, failure)
    return True


def is_written(logs: Path, attempt: int) -> bool:
    """Return whether the first failure of the `attempt`-th start is in a file, where other processes can read it."""
    return _make_path(logs, attempt).exists()


def find_first(logs: Path, attempt: int) -> RankFailure | None:
    """Return the first failure of the `attempt`-th start, or None if no rank has written one."""
    try:
        return RankFailure(**json.loads(read_regular(_make_path(logs, attempt))))
    except (OSError, ValueError, TypeError):
        return _unwritten.get(_make_path(logs, attempt))


def find_time(logs: Path, attempt: int) -> float | None:
    """Return when the first failure of the `attempt`-th start was written, in seconds since the epoch, or None.

    The time is from the clock of the logs' file system.
    """
    try:
        return _make_path(logs, attempt).stat().st_mtime
    except OSError:
        return None


def report(failure: RankFailure, logs: Path) -> str:
    """Return the text that the user sees for a failure that is not a user error."""
    again = f"train resume={shlex.quote(str(logs.parent))}"
    if failure.kind == "restart":
        return (
            f"train: {failure.what}\n  New workers were requested, but no restart is left.\n  To continue:  {again}\n"
        )
    if failure.kind == "lost":
        return f"train: {failure.what}\nLogs: {logs}\nTo continue:  {again}\n"
    end = "" if failure.trace else _read_tail(log_path(logs, failure.rank))
    if failure.what == describe_end(-signal.SIGBUS) and (changes := describe_changed_data(logs.parent)):
        end = f"  {changes}\n{end}"
    log = f"Log of the rank: {log_path(logs, failure.rank)}\n"
    return f"train: rank {failure.rank} failed first: {failure.what}\n{failure.trace}{end}{log}To continue:  {again}\n"


def _read_tail(log: Path, lines: int = 5) -> str:
    """Return the last lines of the log of a rank that ended without a report."""
    try:
        with open_regular(log, sys.maxsize) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            tail = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return ""
    except UserError as error:  # shown in place of the log, so that the failure is still reported
        tail = str(error).splitlines()
    return "".join(f"  | {line}\n" for line in tail)


def clear(logs: Path) -> None:
    """Delete the recorded failures of earlier starts of the run."""
    _unwritten.clear()
    for path in logs.glob("first-failure-*"):
        path.unlink(missing_ok=True)


def _make_path(logs: Path, attempt: int) -> Path:
    return logs / f"first-failure-{attempt}.json"


def explain_lost_server(code: int) -> str:
    """Return a description of the fork server's exit."""
    return f"the fork server, which starts the ranks, is gone: {describe_end(code)}"


def describe_end(exit_code: int) -> str:
    """Return a description of a process's exit code."""
    if exit_code >= 0:
        return f"it lost its connection to the other ranks, or ended with exit code {exit_code}"
    name = name_of(-exit_code)
    return f"it was killed by {name}{_HINTS.get(name, '')}"
