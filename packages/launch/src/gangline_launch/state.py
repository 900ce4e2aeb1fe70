"""State of a cluster job, in terms that all schedulers share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gangline_launch.job import SubmittedJob

WAITS, RUNS, ENDED, GONE = "waits", "runs", "ended", "gone"  # GONE: the scheduler has forgotten the job


@dataclass(frozen=True)
class JobState:
    """State of a job. phase: WAITS, RUNS, ENDED or GONE; word: scheduler's name of it; why: reason of wait or end."""

    phase: str
    word: str
    why: str = ""
    nodes: str = ""
    starts: int = 0  # number of restarts
    hopeless: str = ""  # for a job that can never start, the options to change; otherwise ""

    @property
    def over(self) -> bool:
        return self.phase in (ENDED, GONE)

    def describe(self) -> str:
        """Return the state as one line of text."""
        again = f", restarted {self.starts} times" if self.starts > 1 else ", restarted" * self.starts
        on = f" on {self.nodes}" if self.nodes and self.phase == RUNS else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.word.lower().replace('_', ' ')}{on}{why}{again}"


class SchedulerError(Exception):
    """Error of a scheduler that refused a request, or did not answer: then it may have executed the request."""


class Scheduler(Protocol):
    """Interface to a cluster scheduler. Methods raise SchedulerError if it refuses or does not answer."""

    def get_state(self, job: SubmittedJob) -> JobState:
        """Return the current state of a job."""

    def cancel(self, job: SubmittedJob) -> None:
        """Cancel the job and return without waiting; its ranks save a checkpoint first if they can."""
