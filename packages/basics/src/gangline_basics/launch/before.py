"""Ending of the start before a job's first one, needed when a command is run again. Torch-free.

A scheduler that requeues a job, a loop around the command and a person who types it twice all begin a new job in
the run directory of an earlier one. The failure there may recur, so the first `launch` event of the new job records it.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from gangline.run.ending import EXIT_REQUEUE, RunEnding, decide_ending, read_ending
from gangline.run.events import read_events
from gangline.run.generation import read_progress
from gangline_basics.launch import failures

FAILED = ("bug", "killed")  # endings that count as failures


@dataclass(frozen=True)
class StartBefore:
    """The newest start of an earlier job of the run with this configuration.

    after             its ending: a `reason` of ending.json, "killed" if no process could write one, "" if there was no
                      such start or the configuration has changed
    evidence, member  of a failed start, see `RankFailure`
    """

    after: str = ""
    evidence: str = ""
    member: str = ""
    counted: bool = False  # counted as a failure by a launcher that then gave up restarting

    @property
    def failed(self) -> bool:
        return self.after in FAILED


def start_before(run_dir: Path) -> StartBefore:
    """Return the newest start of an earlier job. Call it before a start clears the files of the previous one."""
    launches = [line for line in read_events(run_dir) if line.get("event") == "launch"]
    if not launches or launches[-1].get("config") != identify_config(run_dir):
        return StartBefore()
    number = launches[-1].get("generation", 0)
    failure = failures.find_first(run_dir / "logs", number)
    ending = read_ending(run_dir) or (failure.make_ending(number) if failure is not None else decide_ending(number))
    after = _format_reason(ending)
    if after not in FAILED:
        return StartBefore(after)
    counted = read_progress(run_dir).generation > number
    if failure is not None:
        return StartBefore(after, failure.evidence, failure.member, counted)
    return StartBefore(after, " ".join(ending.evidence.splitlines()[:1]), counted=counted)


def identify_config(run_dir: Path) -> str:
    """Return a hash of the configuration of a run, "" if there is none: a changed one may fix a failure."""
    path = run_dir / "config.yaml"
    return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.exists() else ""


def _format_reason(ending: RunEnding) -> str:
    missed = ending.reason == "killed" and ending.exit_code == EXIT_REQUEUE  # too few nodes joined: no rank failed
    return "preempted" if missed else ending.reason
