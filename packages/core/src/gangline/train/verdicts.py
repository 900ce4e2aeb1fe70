"""Verdicts of health checks in the training loop, gathered from every rank, and the response that follows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TypeVar

from gangline.checkpoint.id import CheckpointId
from gangline.comm.objects import gather_json
from gangline.health import Action, Agreed, HealthCheck, Response, Verdict, decide
from gangline.record import StepRecord
from gangline.run import attempts
from gangline.train.agree import gather_verdicts
from gangline.train.callbacks import call_member, call_together, take_failures
from gangline.train.session import Session

STORE_LOST = "store-lost"
LASTING = 1000  # number of bad steps in a row reported for weights that cannot recover

Said = TypeVar("Said", bound=Verdict | Response | None)


def before_run(s: Session) -> tuple[Response, Agreed]:
    """Return (response, its input) for verdicts before the first step; equal on all ranks."""
    own_verdicts = [
        _as_json(verdict)
        for name, check in s.health.items()
        for verdict in call_together(s, f"health/{name}", lambda check=check: list(check.before_run()))
    ]
    return judge(s, *gather_verdicts(s.comms.world, own_verdicts), None)


def before_update(s: Session, loss: float, grad_norm: float) -> tuple[str, tuple[Verdict, ...]]:
    """Return (reason to skip the update or "", verdicts) between gradient clipping and update, equal on all ranks."""
    asking = {name: check for name, check in s.health.items() if asks_before_update(check)}
    if not asking:
        return "", ()
    own_verdicts = [v for name, check in asking.items() for v in ask(s, name, check.before_update, loss, grad_norm)]
    response, agreement = judge(s, *gather_verdicts(s.comms.world, own_verdicts), None)
    why = "; ".join(str(verdict) for verdict in agreement.verdicts if verdict.kind in response.kinds)
    return why if response.action >= Action.SKIP else "", agreement.verdicts


def after_step(s: Session, record: StepRecord) -> list[Verdict]:
    """Return the verdicts of this rank's checks and of core on the step just done."""
    own_verdicts = [] if record.finite or s.run.precision.finds_scale else [make_not_finite(record)]
    if s.bad_weights:
        own_verdicts.append(take_bad_weights(s))
    if s.cut_off:
        own_verdicts.append(cut_off(s))
    for name, check in s.health.items():
        if record.step % check.every == 0:
            call_together(s, f"health/{name}", check.collective, s.comms.world)
            own_verdicts += ask(s, name, check.observe, record)
    return own_verdicts + take_failures(s)


def judge(s: Session, verdicts: Iterable[Verdict], now: float, record: StepRecord | None) -> tuple[Response, Agreed]:
    """Return (response, its input). Every rank computes a response and takes rank 0's, so that all ranks act alike."""
    findings = tuple({json.dumps(v.to_dict()): v for v in verdicts}.values())  # ranks report equal verdicts
    if not findings:
        return Response(Action.NOTE, ()), Agreed((), (), now)
    coming = s.step + 1 if record is None else record.step  # number of the judged step, or of the next step
    agreement = Agreed(findings, tuple(attempts.iterate_happened(s.history, s.attempt, coming)), now)
    responses = [
        call_member(s, f"health/{name}", lambda check=check: _as_json(check.respond(agreement, record)))
        for name, check in s.health.items()
    ]
    response = decide(agreement, [one for one in responses if one is not None])
    return Response.of(gather_json(s.comms.world, asdict(response))[0]), agreement


def ask(s: Session, name: str, call: Callable[..., Iterable[Verdict]], *arguments: object) -> list[Verdict]:
    """Return a check's verdicts; if the check raises, add a note and return no verdict."""
    return call_member(s, f"health/{name}", lambda: [_as_json(verdict) for verdict in call(*arguments)]) or []


def _as_json(said: Said) -> Said:
    """Return the value unchanged. Raises TypeError or ValueError if it cannot be sent to other ranks as JSON."""
    json.dumps(None if said is None else said.to_dict() if isinstance(said, Verdict) else asdict(said))
    return said


def asks_before_update(check: HealthCheck) -> bool:
    """Return whether a check overrides `before_update`; only then a step has the additional all-gather."""
    return type(check).before_update is not HealthCheck.before_update


def cut_off(s: Session) -> Verdict:
    """Return core's verdict on a lost store: training could continue, but no later step could be saved."""
    why = f"the connection to the job store is lost permanently ({s.cut_off}), and saves need the store"
    newest = f"{s.saved} is the newest checkpoint" if s.saved else "there is no checkpoint"
    return Verdict(STORE_LOST, f"rank {s.comms.rank}", 1.0, f"{why}; {newest}", Action.RESTART)


def take_bad_weights(s: Session) -> Verdict:
    """Return core's verdict on weights that a save refused, and clear `bad_weights`: a later save checks again."""
    checkpoint = CheckpointId.parse(s.saved) if s.saved else None
    details = {"step": s.step, "first": 1 + (checkpoint.step if checkpoint else 0), "row": LASTING}
    evidence, s.bad_weights = f"{s.bad_weights}; newest complete checkpoint: {s.saved or 'none'}", ""
    return Verdict("not-finite", f"step {s.step}", 1.0, evidence, Action.STOP, details=details)


def make_not_finite(record: StepRecord) -> Verdict:
    """Return core's verdict on a step that is not finite; a health check may override or answer it."""
    evidence = f"loss {record.loss}, gradient norm {record.grad_norm}; the weights were not updated"
    return Verdict("not-finite", f"step {record.step}", 1.0, evidence, Action.STOP)
