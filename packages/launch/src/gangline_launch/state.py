"""How a job stands, in the words that all schedulers share. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from gangline_launch.job import SubmittedJob

WAITS, RUNS, ENDED, GONE = "waits", "runs", "ended", "gone"  # GONE: the scheduler knows nothing of it any more


@dataclass(frozen=True)
class JobState:
    """phase: WAITS, RUNS, ENDED or GONE. word: the scheduler's own word. why: what it waits for, or how it ended."""

    phase: str
    word: str
    why: str = ""
    nodes: str = ""
    starts: int = 0  # how often it was started again
    hopeless: str = ""  # what to change where no waiting helps; "" where waiting may

    @property
    def over(self) -> bool:
        return self.phase in (ENDED, GONE)

    def describe(self) -> str:
        """For people."""
        again = f", started again {self.starts} times" if self.starts > 1 else ", started again" * self.starts
        on = f" on {self.nodes}" if self.nodes and self.phase == RUNS else ""
        why = f" ({self.why})" if self.why else ""
        return f"{self.word.lower().replace('_', ' ')}{on}{why}{again}"


class SchedulerError(Exception):
    """The scheduler refused a question, or gave no answer to it; its text says how. The job is as it was."""


class Scheduler(Protocol):
    """What may be asked of the one that has the job. Raises SchedulerError where there is no answer."""

    def get_state(self, job: SubmittedJob) -> JobState:
        """How it stands now."""

    def cancel(self, job: SubmittedJob) -> None:
        """End it: its ranks save first, where they can. Returns at once."""
