"""How the start before a job's first one ended: what the same command, given again, has to know. Torch-free.

A scheduler that queues a job again, a loop around the command and a person who types it twice all begin a new job in
the run directory of an earlier one. What failed there may fail again, so it is told in the first `launch` of the job.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from gangline.launch import failures
from gangline.launch.failures import EXIT_STOPPED, RankFailure
from gangline.run.ending import EXIT_REQUEUE, RunEnding, read_ending
from gangline.run.events import read_events
from gangline.run.generation import progress

REASONS = {"user": "mistake", "bug": "bug", "restart": "restart", "lost": "killed"}  # of a job's end, by who failed
ENDED = {EXIT_STOPPED: "verdict", EXIT_REQUEUE: "preempted"}  # by exit code, where rank 0 had no time to say it
FAILED = ("bug", "killed")  # how a start ends that failed
NOBODY = "everything was killed, and nobody was left to say why"


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
    if not launches or launches[-1].get("config") != config_of(run_dir):
        return StartBefore()
    number = launches[-1].get("generation", 0)
    ending, failure = read_ending(run_dir), failures.first(run_dir / "logs", number)
    after = _reason(ending, failure)
    if after not in FAILED:
        return StartBefore(after)
    counted = progress(run_dir).generation > number
    if failure is not None:
        return StartBefore(after, failure.evidence, failure.member, counted)
    why = NOBODY if ending is None else " ".join(ending.evidence.splitlines()[:1])
    return StartBefore(after, why, counted=counted)


def config_of(run_dir: Path) -> str:
    """Names the configuration of a run: another one may mend what failed."""
    path = run_dir / "config.yaml"
    return blake2b(path.read_bytes(), digest_size=8).hexdigest() if path.exists() else ""


def reason_of(failure: RankFailure) -> str:
    """Why a job ends that ends by this failure."""
    return ENDED.get(failure.exit_code, "bug") if failure.kind == "ended" else REASONS.get(failure.kind, "bug")


def _reason(ending: RunEnding | None, failure: RankFailure | None) -> str:
    if ending is None:
        return "killed" if failure is None else reason_of(failure)
    missed = ending.reason == "killed" and ending.exit_code == EXIT_REQUEUE  # nodes did not come: no rank failed
    return "preempted" if missed else ending.reason
