"""How the start before a job's first one ended: what the same command, given again, has to know. Torch-free.

A scheduler that queues a job again, a loop around the command and a person who types it twice all begin a new job in
the run directory of an earlier one. What failed there may fail again, so it is told in the first `launch` of the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from gangline.run.ending import EXIT_REQUEUE, RunEnding, decide_ending, read_ending
from gangline.run.events import read_events
from gangline.run.generation import read_progress
from gangline_basics.launch import failures

FAILED = ("bug", "killed")  # how a start ends that failed


@dataclass(frozen=True)
class StartBefore:
    """The newest start of an earlier job of the run, as it was asked for.

    after: how it ended, a `reason` of ending.json, "killed" where nobody was left to say so; "" where there was none,
    or the configuration is not what it was. evidence, member: of one that failed, see `RankFailure`.
    """

    after: str = ""
    evidence: str = ""
    member: str = ""
    counted: bool = False  # as a failure, by the launcher that started no ranks again

    @property
    def failed(self) -> bool:
        return self.after in FAILED


def start_before(run_dir: Path) -> StartBefore:
    """To be asked before a start clears away what the one before it has left."""
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
    """Names the configuration of a run: another one may mend what failed."""
    path = run_dir / "config.yaml"
    return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.exists() else ""


def _format_reason(ending: RunEnding) -> str:
    missed = ending.reason == "killed" and ending.exit_code == EXIT_REQUEUE  # nodes did not come: no rank failed
    return "preempted" if missed else ending.reason
