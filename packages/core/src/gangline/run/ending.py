"""Ending of a run's job: decided in one place, and written to ending.json for schedulers and tools. Torch-free.

The file is replaced at each end and removed at each start: if it is missing, the job lives or was killed. Between two
starts of an elastic job it says how the ranks of the first one ended.
"""

from __future__ import annotations

import json
import signal as signals
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline.errors import EXIT_USER_ERROR
from gangline.storage.files import read_regular, write_whole

FILE = "ending.json"
VERSION = 1
EXIT_FAILURE = 1
EXIT_STOPPED = 3  # a verdict ended the run; the message has its kind
EXIT_REQUEUE = 75  # saved, and to be requeued: EX_TEMPFAIL of sysexits.h
PREEMPTING = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # signals that a scheduler sends; a person presses Ctrl-C

FAILURES = {"user": "mistake", "restart": "restart"}  # failure of a rank -> reason; else "bug"
RANK_CODES = {EXIT_USER_ERROR: "mistake", EXIT_STOPPED: "verdict", EXIT_REQUEUE: "preempted"}  # of "ended"; else "bug"
JOB_CODES = {0: "done", EXIT_USER_ERROR: "mistake", EXIT_STOPPED: "verdict"}  # of "lost"; else "killed"
EXCLUDES = ("restart", "verdict")  # reasons by which an order ends the job


@dataclass(frozen=True, kw_only=True)
class RunEnding:
    """Ending of the job of a run.

    generation  number of the last start of the ranks, see `gangline.run.generation`
    reason      "done", "bug" (a rank failed), "mistake" (the user's), "verdict" (a stop), "restart" (a verdict asks for
                new workers, and no restart is left), "preempted" (a signal, and saved), "signal" (and not saved),
                "killed" (a rank or node was lost and could not be started again)
    exclude     names of nodes to leave out of the next start
    requeue     whether the same command, given again, may get further: as it is (75), or after a failure, as on other
                machines (1)
    exit_code   exit code of the command
    evidence    in words
    """

    generation: int
    reason: str
    exit_code: int
    requeue: bool = False
    exclude: tuple[str, ...] = ()
    evidence: str = ""
    version: int = VERSION


def decide_ending(
    generation: int,
    evidence: str = "",
    *,
    done: bool = False,
    signal: str = "",
    saved: bool = False,
    failure: str = "lost",
    exit_code: int = EXIT_FAILURE,
    exclude: tuple[str, ...] = (),
) -> RunEnding:
    """Return the ending of a job: done, else by a signal, else by the failure of a rank.

    signal     name of the signal that asked the ranks to end; saved: a checkpoint holds all their steps
    failure    kind of the failure: "user", "bug", "restart", "ended", or "lost" (no rank could report it)
    exit_code  of the rank that failed; for "lost" of the job, as far as it is known
    evidence   in words; "": a summary of the other arguments
    exclude    nodes that the newest order excludes; kept if an order ends the job
    """
    if done:
        reason, exit_code, summary = "done", 0, "every rank is done"
    elif signal:
        reason = "preempted" if saved and signal in PREEMPTING else "signal"
        exit_code = EXIT_REQUEUE if reason == "preempted" else 128 + signals.Signals[signal].value
        summary = f"{signal}; {'all steps are saved' if saved else 'nothing was saved'}"
    elif failure == "lost":
        reason, summary = JOB_CODES.get(exit_code, "killed"), "everything was killed, and nobody was left to say why"
    elif failure == "ended":
        by_signal = "signal" if exit_code - 128 in set(signals.Signals) else "bug"
        reason, summary = RANK_CODES.get(exit_code, by_signal), f"a rank ended with exit code {exit_code}"
    else:
        reason, summary = FAILURES.get(failure, "bug"), "a rank failed"
    return RunEnding(
        generation=generation,
        reason=reason,
        exit_code=exit_code,
        requeue=reason in ("bug", "killed") or exit_code == EXIT_REQUEUE,
        exclude=exclude if reason in EXCLUDES else (),
        evidence=evidence or summary,
    )


def write_ending(run_dir: str | Path, ending: RunEnding) -> None:
    """Write the ending over an earlier one. A full disk hides no error that ended the run: the file is then missing."""
    try:
        write_whole(Path(run_dir) / FILE, json.dumps(asdict(ending), indent=2) + "\n")
    except OSError:
        clear_ending(run_dir)


def read_ending(run_dir: str | Path) -> RunEnding | None:
    """Return the ending of the newest job of a run; None if it lives, was killed, or has never ended."""
    try:
        content = json.loads(read_regular(Path(run_dir) / FILE))
        fields = {key: content[key] for key in content if key in RunEnding.__dataclass_fields__}
        ending = RunEnding(**{**fields, "exclude": tuple(fields["exclude"])})
        return ending if isinstance(ending.reason, str) and isinstance(ending.evidence, str) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def clear_ending(run_dir: str | Path) -> None:
    """Delete the ending, at each start."""
    (Path(run_dir) / FILE).unlink(missing_ok=True)
