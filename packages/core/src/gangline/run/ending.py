"""Ending of a run's job: decided in one place, and written to ending.json for schedulers and tools. Torch-free.

The file is replaced at each end and removed at each start; if it is missing, the job is alive or was killed. Between
two starts of an elastic job the file says how the ranks of the first start ended.
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
EXIT_STOPPED = 3  # a verdict ended the run; the message has the kind of the verdict
EXIT_REQUEUE = 75  # all steps are saved and the job should be requeued: EX_TEMPFAIL of sysexits.h
PREEMPTING = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # signals of schedulers; Ctrl-C sends SIGINT

# failure -> ending reason; other failures except "ended" and "lost": "bug"
FAILURES = {"user": "mistake", "restart": "restart"}
# failure "ended": exit code of the rank -> reason; other codes: "signal" or "bug"
RANK_CODES = {EXIT_USER_ERROR: "mistake", EXIT_STOPPED: "verdict", EXIT_REQUEUE: "preempted"}
# failure "lost": exit code of the job -> reason; other codes: "killed"
JOB_CODES = {0: "done", EXIT_USER_ERROR: "mistake", EXIT_STOPPED: "verdict"}
EXCLUDES = ("restart", "verdict")  # reasons of jobs that a response ended


@dataclass(frozen=True, kw_only=True)
class RunEnding:
    """Ending of the job of a run.

    generation  number of the last start of the ranks (`gangline.run.generation`)
    reason      "done", "bug" (a rank failed), "mistake" (of the user), "verdict" (a stop), "restart" (a verdict needs
                new workers, but no restart is left), "preempted" (a signal, all steps saved), "signal" (a signal, not
                saved), "killed" (a rank or node was lost and could not be restarted)
    exclude     names of nodes to leave out of the next start
    requeue     whether the same command may succeed if repeated: in any case (exit code 75), or after a failure, for
                example on other machines (1)
    exit_code   exit code of the command
    evidence    explanation in words
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
    """Return the ending of a job: done, else ended by a signal, else by the failure of a rank.

    signal     name of the signal that asked the ranks to end. saved: whether a checkpoint holds all steps
    failure    kind of the failure: "user", "bug", "restart", "ended", or "lost" (no rank could report the failure)
    exit_code  exit code of the failed rank; for "lost" exit code of the job, if known
    evidence   explanation in words; "": a summary of the other arguments
    exclude    names of nodes that the newest response excludes; used only if a response ended the job
    """
    if done:
        reason, exit_code, summary = "done", 0, "every rank is done"
    elif signal:
        reason = "preempted" if saved and signal in PREEMPTING else "signal"
        exit_code = EXIT_REQUEUE if reason == "preempted" else 128 + signals.Signals[signal].value
        summary = f"{signal}; {'all steps are saved' if saved else 'not all steps are saved'}"
    elif failure == "lost":
        reason, summary = JOB_CODES.get(exit_code, "killed"), "all ranks were killed before one reported an error"
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
    """Replace ending.json. An OSError, such as a full disk, is not raised; the file is then removed."""
    try:
        write_whole(Path(run_dir) / FILE, json.dumps(asdict(ending), indent=2) + "\n")
    except OSError:
        clear_ending(run_dir)


def read_ending(run_dir: str | Path) -> RunEnding | None:
    """Return the ending of the newest job of a run; None if the job is alive or was killed, or without a job."""
    try:
        content = json.loads(read_regular(Path(run_dir) / FILE))
        fields = {key: content[key] for key in content if key in RunEnding.__dataclass_fields__}
        ending = RunEnding(**{**fields, "exclude": tuple(fields["exclude"])})
        return ending if isinstance(ending.reason, str) and isinstance(ending.evidence, str) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def clear_ending(run_dir: str | Path) -> None:
    """Delete ending.json. Called at each start."""
    (Path(run_dir) / FILE).unlink(missing_ok=True)
