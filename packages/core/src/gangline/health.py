"""Health checks look at the step record and say what is wrong and what to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from gangline.callback import Callback

if TYPE_CHECKING:
    from gangline.comm import Comm
    from gangline.record import StepRecord


class Action(IntEnum):
    """What a verdict asks for, mildest first; of several verdicts the strongest is taken.

    NOTE       write it down
    WARN       tell the user
    SKIP       go on; a step that was not finite stays left out
    ROLL_BACK  return to the last checkpoint and pass over the samples since
    RESTART    start the workers again from the last checkpoint
    STOP       end the run
    """

    NOTE = 0
    WARN = 1
    SKIP = 2
    ROLL_BACK = 3
    RESTART = 4
    STOP = 5


@dataclass(frozen=True)
class Verdict:
    """One finding."""

    kind: str  # a short machine-readable word: "not-finite", "loss-spike"
    where: str  # "rank 3", "blocks.7", "step 120"
    confidence: float  # 0 to 1
    evidence: str  # what was seen, with numbers
    suggestion: Action
    overrides: tuple[str, ...] = ()  # kinds whose suggestion this one replaces ("not-finite": skip instead of stop)
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.evidence}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "suggestion": self.suggestion.name.lower()}


class HealthCheck(Callback, ABC):
    """A callback that observes every step on every rank. What it raises is caught and named, and never ends the run."""

    every: int = 1  # observe each `every`-th step

    @abstractmethod
    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        """Verdicts on the step just done. No collectives here."""

    def before_run(self) -> Iterable[Verdict]:
        """Called once before the first step."""
        return ()

    def collective(self, comm: Comm) -> None:
        """The only place for collectives: called on all ranks before `observe`, each `every`-th step."""


def decide(verdicts: Iterable[Verdict]) -> Action:
    """The one action: the strongest suggestion left after overrides."""
    found = list(verdicts)
    overridden = {kind for verdict in found for kind in verdict.overrides}
    return max((v.suggestion for v in found if v.kind not in overridden), default=Action.NOTE)
