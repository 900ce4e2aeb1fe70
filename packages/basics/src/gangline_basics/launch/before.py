"""How the last start of an earlier job in the same run directory ended. Torch-free.

A scheduler that requeues a job, a loop around the command and a user who repeats the command all begin a new job in the
run directory of an earlier job. The earlier failure may recur, so the first `launch` event of the new job records it.
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

    after             ending of the start: a `reason` of ending.json, "killed" if no process could write a reason, "" if
                      no such start exists or the configuration has changed
    evidence, member  fields of the `RankFailure` of a failed start
    """

    after: str = ""
    evidence: str = ""
    member: str = ""
    counted: bool = False  # True if the earlier launcher counted the failure as a restart before it gave up

    @property
    def failed(self) -> bool:
        return self.after in FAILED


def start_before(run_dir: Path) -> StartBefore:
    """Return the newest start of an earlier job. Call this before a start clears the files of the previous start."""
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
    """Return a hash of a run's config.yaml, or "" without the file: a changed configuration may fix a failure."""
    path = run_dir / "config.yaml"
    return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.exists() else ""


def _format_reason(ending: RunEnding) -> str:
    missed = ending.reason == "killed" and ending.exit_code == EXIT_REQUEUE  # if too few nodes joined, no rank failed
    return "preempted" if missed else ending.reason
