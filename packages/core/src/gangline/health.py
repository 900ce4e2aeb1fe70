"""Health checks: they observe a run and return verdicts. A response is the action that follows from verdicts.

Core gathers the verdicts of all ranks and carries out one response. A check with a playbook returns the response to
verdicts (`respond`); if no check answers a verdict, core takes the action that the verdict suggests.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from gangline.callback import Callback
from gangline.errors import RAISED
from gangline.pulse.write import get_current

if TYPE_CHECKING:
    from gangline.comm.base import Comm
    from gangline.record import StepRecord
    from gangline.run.attempts import Attempt


class Action(IntEnum):
    """Action that a verdict suggests or a response takes, mildest first; of several actions the strongest is taken.

    NOTE       record the verdict
    WARN       warn the user
    SKIP       skip the update of this step, and continue
    ROLL_BACK  return to a checkpoint and skip samples
    RESTART    start the workers again from a checkpoint
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
    """One fault or event that a health check detected."""

    kind: str  # short machine-readable name: "not-finite", "loss-spike"
    where: str  # "rank 3", "blocks.7", "step 120"; "the run" is left out of printed lines
    confidence: float  # 0 to 1
    evidence: str  # observed values, with numbers
    suggestion: Action
    overrides: tuple[str, ...] = ()  # kinds of verdicts whose suggestions this verdict replaces, e.g. "loss-spike"
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        place = "" if self.where == "the run" else f" at {self.where}"
        return f"{self.kind}{place}: {self.evidence}"

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "suggestion": self.suggestion.name.lower()}

    @classmethod
    def of(cls, content: dict[str, Any]) -> Verdict:
        """Return the verdict that `to_dict` wrote, also through JSON."""
        suggestion, overrides = Action[content["suggestion"].upper()], tuple(content["overrides"])
        return cls(**{**content, "suggestion": suggestion, "overrides": overrides})


@dataclass(frozen=True)
class Response:
    """Response to verdicts, carried out at the same step boundary on all ranks.

    action       action to take; of several responses core takes the one with the strongest action
    kinds        kinds of the verdicts that are answered: the suggestions of these verdicts no longer count
    before_step  ROLL_BACK and RESTART: go back to the newest checkpoint before this step; None: the newest checkpoint
    else_before  if no checkpoint is before `before_step`: take the oldest one before this later step
    skip         number of samples to skip, from the checkpoint's cursor on; None: under ROLL_BACK all samples read
                 since the checkpoint, under RESTART none. Skipped samples stay skipped in all later attempts
    rate         factor of the learning rate in the `rate_steps` steps after the step that the run continues from;
                 also applied after a restart
    exclude      nodes to leave out of the next start, if other nodes can replace them: names of nodes, or of one of
                 the node's ranks ("rank 3")
    why          reason in addition to the evidence of the verdicts, such as a budget that is used up

    Raises ValueError for a negative number of samples, and for a factor that is negative or not finite.
    """

    action: Action
    kinds: tuple[str, ...]
    before_step: int | None = None
    else_before: int | None = None
    skip: int | None = None
    rate: float = 1.0
    rate_steps: int = 0
    exclude: tuple[str, ...] = ()
    why: str = ""

    def __post_init__(self) -> None:
        if self.skip is not None and self.skip < 0:
            raise ValueError(f"the number of samples that a response skips must be at least 0, not {self.skip}")
        if not (self.rate >= 0 and math.isfinite(self.rate)):
            raise ValueError(f"the learning-rate factor of a response must be finite and at least 0, not {self.rate}")

    @classmethod
    def of(cls, content: dict[str, Any]) -> Response:
        """Return the response with these fields, read from JSON."""
        lists = {name: tuple(content[name]) for name in ("kinds", "exclude")}
        return cls(**{**content, **lists, "action": Action(content["action"])})

    @property
    def changes_course(self) -> bool:
        """Whether the response is recorded as a line in attempts.jsonl."""
        return self.action >= Action.ROLL_BACK or self.cuts or bool(self.exclude)

    @property
    def cuts(self) -> bool:
        """Whether the response changes the learning rate."""
        return self.rate != 1.0 and self.rate_steps > 0


@dataclass(frozen=True)
class Agreed:
    """Input of a playbook, equal on every rank.

    verdicts  verdicts of all ranks, in rank order
    history   lines of attempts.jsonl: every start of the run, and every response for which `changes_course` was true
    now       seconds since the epoch, on global rank 0
    """

    verdicts: tuple[Verdict, ...]
    history: tuple[Attempt, ...] = ()
    now: float = 0.0

    def select(self, kind: str) -> list[Verdict]:
        """Return the verdicts of one kind."""
        return [verdict for verdict in self.verdicts if verdict.kind == kind]

    def list_responses(self, kind: str, action: Action) -> list[Attempt]:
        """Return earlier responses with this action to verdicts of this kind, oldest first, for a playbook's budget."""
        return [line for line in self.history if kind in line.kinds and line.action == action.name.lower()]


class HealthCheck(Callback, ABC):
    """A callback that detects failures, on every rank.

    An exception in any method except `before_run`, `collective` and `shards` is caught and reported; the run continues.
    In `before_run` and `collective` it ends this start of the ranks, because the other ranks would wait in a collective
    for ever. The next starts of the job leave out the check, or the part of the check that was running (`run_within`).

    Use collectives only in `before_run` and `collective`, on any Comm that `attach` was given.
    """

    every: int = 1  # interval in steps between two calls of `observe`

    @abstractmethod
    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        """Return verdicts on the step just done. Must not use collectives.

        Core gathers `rank_seconds`, `rank_phases` and `rank_losses` together with the verdicts and sets these fields of
        `record` after the call: keep the record and read the fields in the next call.
        """

    def before_run(self) -> Iterable[Verdict]:
        """Return verdicts before the first step of this start; a verdict that leads to STOP refuses the run."""
        return ()

    def before_update(self, loss: float, grad_norm: float) -> Iterable[Verdict]:
        """Return verdicts between gradient clipping and the update; SKIP skips this update. Must not use collectives.

        loss and grad_norm are global. Called in every finite step. If any check of the run overrides this method, each
        step has one more all-gather over all ranks.
        """
        return ()

    def collective(self, comm: Comm) -> None:
        """Gather the data of other ranks for `observe`. Called on all ranks every `every` steps, before `observe`."""

    def leave_out(self, part: str) -> bool:
        """Leave out the part `part`, whose code (`run_within`) failed or hung in an earlier start of this job.

        Called on all ranks, before `attach`. Returns False if the check has no such part. If any rank returns False or
        raises, core leaves out the complete check on all ranks.
        """
        return False

    def respond(self, agreed: Agreed, record: StepRecord | None) -> Response | None:
        """Return a response to verdicts of any check and rank; None: no answer.

        Must be a pure function of `agreed` and of the fields of `record` that are equal on all ranks (record: None
        before the run and before an update). Called on every rank; rank 0's response is used. Read earlier responses
        from `agreed.history`, not from the state of the check: a rollback restores the state, but not the history.
        """
        return None


@contextmanager
def run_within(part: str) -> Iterator[None]:
    """Mark the block as part `part` of the running health check, so that core attributes exceptions and hangs to it.

    After such a failure the next starts of the job disable the part (`HealthCheck.leave_out`).
    """
    pulse = get_current()
    check = pulse.call("")
    pulse.call(f"{check}/{part}")
    try:
        yield
    except RAISED as error:
        inner = vars(error).get("raised_in", "")
        vars(error)["raised_in"] = f"{part}/{inner}" if inner else part
        raise
    finally:
        pulse.call(check)


def decide(agreed: Agreed, responses: Sequence[Response]) -> Response:
    """Return the strongest of the checks' responses and core's own response to verdicts that no check answers.

    The result also has the exclusions of the other responses, and their learning-rate change if it has none.
    """
    answered = {kind for response in responses for kind in response.kinds}
    candidates = [*responses, decide_response(agreed.verdicts, answered)]
    strongest = max(candidates, key=lambda response: response.action)
    for response in candidates:
        if response is not strongest and (response.cuts or response.exclude):
            cut = strongest if strongest.cuts else response
            exclude = tuple(dict.fromkeys(strongest.exclude + response.exclude))
            kinds = tuple(dict.fromkeys(strongest.kinds + response.kinds))
            strongest = replace(strongest, rate=cut.rate, rate_steps=cut.rate_steps, exclude=exclude, kinds=kinds)
    return strongest


def decide_response(verdicts: Iterable[Verdict], answered: Iterable[str] = ()) -> Response:
    """Return core's own response: the strongest suggestion among verdicts that are neither overridden nor answered."""
    entries, answered = list(verdicts), set(answered)
    overridden = answered.union(*(verdict.overrides for verdict in entries))
    own = [verdict for verdict in entries if verdict.kind in verdict.overrides]  # override verdicts of their own kind
    open_verdicts = [v for v in entries if v.kind not in overridden or (v in own and v.kind not in answered)]
    action = max((verdict.suggestion for verdict in open_verdicts), default=Action.NOTE)
    return Response(
        action, tuple(dict.fromkeys(verdict.kind for verdict in open_verdicts if verdict.suggestion == action))
    )
