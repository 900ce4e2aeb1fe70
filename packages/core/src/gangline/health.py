"""Health checks look at a run and say what is wrong; orders say what is done about it.

A verdict finds, an order acts. Verdicts are gathered from all ranks, and one order is made of them: a check that knows
a playbook answers (`respond`), and what none answers core does as the verdict suggests.
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
    """What a verdict suggests and an order does, mildest first; of several the strongest is taken.

    NOTE       write it down
    WARN       tell the user
    SKIP       leave the weights as they are in this step, and go on
    ROLL_BACK  return to a checkpoint and pass over samples
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

    @classmethod
    def of(cls, content: dict[str, Any]) -> Verdict:
        """From what `to_dict` gave, also through JSON."""
        suggestion, overrides = Action[content["suggestion"].upper()], tuple(content["overrides"])
        return cls(**{**content, "suggestion": suggestion, "overrides": overrides})


@dataclass(frozen=True)
class Order:
    """What is done about verdicts, at the same step boundary on all ranks.

    action       the strongest of several orders is taken
    kinds        of the verdicts that it answers: their own suggestions no longer count
    before_step  ROLL_BACK and RESTART: to the newest checkpoint in which this step is not done; None: to the newest
    else_before  where there is none: to the oldest in which this later step is not done
    skip         samples that are passed over, from that checkpoint's cursor on; None: under ROLL_BACK all that were
                 read since, under RESTART none. They stay passed over, whatever happens later
    rate         the learning rate is multiplied by this in the next `rate_steps` steps, counted from where the run goes
                 on; also after a restart
    exclude      nodes that are to have no part in the next start, where others can take their place: by name, or by one
                 of their ranks ("rank 3")
    why          what there is to say beside the evidence of the verdicts, such as a budget that is spent

    Raises ValueError for a negative number of samples or a rate that is none.
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
            raise ValueError(f"an order cannot pass over {self.skip} samples")
        if not (self.rate >= 0 and math.isfinite(self.rate)):
            raise ValueError(f"an order cannot multiply the learning rate by {self.rate}")

    @classmethod
    def of(cls, content: dict[str, Any]) -> Order:
        """From its fields as JSON has them."""
        lists = {name: tuple(content[name]) for name in ("kinds", "exclude")}
        return cls(**{**content, **lists, "action": Action(content["action"])})

    @property
    def changes_course(self) -> bool:
        """Whether it is a line in attempts.jsonl."""
        return self.action >= Action.ROLL_BACK or self.cuts or bool(self.exclude)

    @property
    def cuts(self) -> bool:
        """Whether the learning rate changes."""
        return self.rate != 1.0 and self.rate_steps > 0


@dataclass(frozen=True)
class Agreed:
    """What a playbook decides from: the same on every rank.

    verdicts  of all ranks, in rank order
    history   the lines of attempts.jsonl: every start of the run, and every order that changed its course
    now       seconds since the epoch, on global rank 0
    """

    verdicts: tuple[Verdict, ...]
    history: tuple[Attempt, ...] = ()
    now: float = 0.0

    def select(self, kind: str) -> list[Verdict]:
        """The verdicts of one kind."""
        return [verdict for verdict in self.verdicts if verdict.kind == kind]

    def list_orders(self, kind: str, action: Action) -> list[Attempt]:
        """The earlier orders of this action for verdicts of this kind, oldest first: a budget counts them."""
        return [line for line in self.history if kind in line.kinds and line.order == action.name.lower()]


class HealthCheck(Callback, ABC):
    """A callback that finds what is wrong, on every rank. What it raises is caught and named, and ends no run.

    But for `before_run` and `collective`, in which ranks wait for each other: none may go on without the rest. What one
    of these raises ends that start of the ranks, and the next ones of the job do without the check, or without the part
    of it that was running (`run_within`).

    Collectives belong in `before_run` and `collective`, on any Comm that `attach` was given.
    """

    every: int = 1  # observe each `every`-th step

    @abstractmethod
    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        """Verdicts on the step just done. No collectives here.

        What ranks tell each other (`rank_seconds`, `rank_phases`, `rank_losses`) is gathered together with the
        verdicts: it comes into this same record after the call, and can be looked at in the next one.
        """

    def before_run(self) -> Iterable[Verdict]:
        """Verdicts before the first step of this start, on which a STOP refuses the run."""
        return ()

    def before_update(self, loss: float, grad_norm: float) -> Iterable[Verdict]:
        """Verdicts between clip and update, on global numbers; a SKIP leaves this step out. No collectives here.

        Asked in every step that is finite. It costs a gather over all ranks, where a check overrides it.
        """
        return ()

    def collective(self, comm: Comm) -> None:
        """Called on all ranks before `observe`, each `every`-th step: what needs the other ranks to be observed."""

    def leave_out(self, part: str) -> bool:
        """Do without that part, in whose code (`run_within`) an earlier start of this job failed or stood still.

        Called on all ranks alike, before `attach`. False: there is no such part, and the whole check is left out. So it
        is on all ranks where one of them says so, or raises.
        """
        return False

    def respond(self, agreed: Agreed, record: StepRecord | None) -> Order | None:
        """What is to be done about the verdicts of all checks and ranks; None where it knows nothing better.

        A pure function of `agreed` and of what is equal on all ranks in the record (None before the run and before an
        update); every rank asks, and the order that rank 0 comes to is carried out. What happened before is in
        `agreed.history`, which outlives a rollback, not in its state, which does not.
        """
        return None


@contextmanager
def run_within(part: str) -> Iterator[None]:
    """Attribute an exception or a hang inside this block to one part of the check that core has called.

    The next starts of the job ask the check to do without it (`HealthCheck.leave_out`).
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


def decide(agreed: Agreed, responses: Sequence[Order]) -> Order:
    """The one order: the strongest among those of the checks and the suggestions of verdicts that no check answers.

    A cut of the rate and an exclusion hold beside it, where the strongest has none of its own.
    """
    answered = {kind for order in responses for kind in order.kinds}
    orders = [*responses, decide_order(agreed.verdicts, answered)]
    strongest = max(orders, key=lambda order: order.action)
    for order in orders:
        if order is not strongest and (order.cuts or order.exclude):
            cut = strongest if strongest.cuts else order
            exclude = tuple(dict.fromkeys(strongest.exclude + order.exclude))
            kinds = tuple(dict.fromkeys(strongest.kinds + order.kinds))
            strongest = replace(strongest, rate=cut.rate, rate_steps=cut.rate_steps, exclude=exclude, kinds=kinds)
    return strongest


def decide_order(verdicts: Iterable[Verdict], answered: Iterable[str] = ()) -> Order:
    """What core does by itself: the strongest suggestion left after overrides and answers."""
    found, answered = list(verdicts), set(answered)
    overridden = answered.union(*(verdict.overrides for verdict in found))
    own = [verdict for verdict in found if verdict.kind in verdict.overrides]  # puts its word in the place of others'
    left = [v for v in found if v.kind not in overridden or (v in own and v.kind not in answered)]
    action = max((verdict.suggestion for verdict in left), default=Action.NOTE)
    return Order(action, tuple(dict.fromkeys(verdict.kind for verdict in left if verdict.suggestion == action)))
