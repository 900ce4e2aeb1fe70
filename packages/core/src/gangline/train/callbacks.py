"""Calls of callbacks and health checks by core, with attribution of their exceptions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch

from gangline.callback import Callback
from gangline.comm.objects import gather_json
from gangline.config.schema import Run
from gangline.errors import RAISED, UserError
from gangline.health import Action, HealthCheck, Verdict
from gangline.plugin.registry import installed
from gangline.pulse.write import get_current
from gangline.run.events import read_events
from gangline.run.provenance import identify_source
from gangline.runtime import Runtime
from gangline.shard import Shard, parse_parameter
from gangline.train.emitted import Emitted, read_metrics
from gangline.train.session import Session

T = TypeVar("T")
GOES_ON = ("bug", "killed", "preempted", "restart")  # endings of a job after which the job is restarted


def attach(s: Session) -> None:
    """Set `place` of every callback and check, and attach it to the built parts.

    Raises ValueError for an array whose name does not begin with the place.
    """
    _leave_out_blamed(s)
    failures: dict[str, str] = {}
    for place, member in s.members.items():
        member.place = place
        try:
            with _mark_calls(place):
                member.attach(s.runtime, s.optimizer, s.comms, s.comms.store, s.device)
        except RAISED as error:
            failures[place] = _explain_failure(s, place, error)
            continue
        strange = [
            name
            for name in chain(member.registry or (), (shard.name for shard in member.shards()))
            if not name.startswith(f"{place}/")
        ]
        if strange:
            raise ValueError(f"{format_choice(place)} has an array {strange[0]!r}; the name must begin with {place}/")
        s.first_states[place] = deepcopy(call_member(s, place, member.state) or {})
    if s.health:
        _leave_out(s, failures)


def _leave_out_blamed(s: Session) -> None:
    """Leave out each check in whose code an earlier start of this job failed or hung.

    Only the failed part of the check is left out, if the check can run without it on every rank.
    """
    if not s.health:
        return
    for place, why in gather_json(s.comms.world, find_blamed(s.directory.path))[0].items():
        _, name, *part = place.split("/", 2)
        if name not in s.health:
            continue
        answers = gather_json(s.comms.world, _explain_absence(s, name, part))
        if refused := [answer for answer in answers if answer is not None]:
            del s.health[name]
            place, why = f"health/{name}", why + max(refused, key=len)
        if s.comms.rank == 0:
            s.untold[f"{format_choice(place)} is disabled until the job ends or its code changes: {why}"] = False


def _explain_absence(s: Session, name: str, part: Sequence[str]) -> str | None:
    """Return None if the check leaves out `part` on this rank; else a reason for the message, or ""."""
    if not part:
        return ""
    place = f"health/{name}"
    try:
        with _mark_calls(place):
            return None if s.health[name].leave_out(part[0]) else ""
    except RAISED as error:
        return f"; the check could not disable only {part[0]}: {_explain_failure(s, place, error)}"


def find_blamed(run_dir: str | Path) -> dict[str, str]:
    """Return the health checks whose code failed on ranks of this job: "health/NAME" -> evidence.

    Earlier jobs count if their ending is in `GOES_ON` (killed, preempted, ...). A start after another ending clears all
    failures; a change of a check's code clears the failures of that check.
    """
    failures: dict[str, tuple[str, str | None]] = {}
    code: dict[str, str] = {}  # check -> hash of its code in the newest start so far
    for line in read_events(run_dir):
        if line.get("event") == "start":
            code = line.get("checks", {})
        elif line.get("event") == "launch":
            place = str(line.get("member", ""))
            if line.get("why") == "start" and line.get("after") not in GOES_ON:
                failures = {}
            elif place.startswith("health/"):
                failures[place] = str(line.get("evidence", "")), code.get(place.split("/")[1])
    return {place: why for place, (why, then) in failures.items() if then == code.get(place.split("/")[1])}


def identify_code(run: Run) -> dict[str, str]:
    """Return name of a check -> hash of its package's code (`identify_source`), for each check of a run."""
    parts = {name: installed().find_part(config).part for name, config in run.health.items()}
    return {name: identify_source(part.build.partition(":")[0]) for name, part in parts.items()}


def _leave_out(s: Session, failed: dict[str, str]) -> None:
    """Leave out, on all ranks, each check whose `attach` failed on any rank: all ranks must have equal arrays."""
    for rank, other in enumerate(gather_json(s.comms.world, failed)):
        for place, why in other.items():
            name = place.partition("/")[2]
            if s.health.pop(name, None) is not None:
                s.notes.append(f"{why} (rank {rank}); the check is disabled in this run")


def call_each(s: Session, event: str, *arguments: object) -> dict[str, float | list[float]]:
    """Call `event` of every callback, then of every check, in configured order; return metrics by `<name>/<metric>`."""
    all_metrics: dict[str, float | list[float]] = {}
    for place, member in s.members.items():
        metrics = call_member(s, place, _call_for_metrics, place, getattr(member, event), *arguments)
        name = place.partition("/")[2]
        all_metrics |= {f"{name}/{metric}": value for metric, value in (metrics or {}).items()}
    return all_metrics


def _call_for_metrics(place: str, call: Callable[..., object], *arguments: object) -> Emitted:
    return read_metrics(format_choice(place), call(*arguments))


def call_before_clip(s: Session) -> None:
    """Pass the gradients of the step to callbacks that override `before_clip`, then discard the measured norm."""
    if any(type(member).before_clip is not Callback.before_clip for member in s.members.values()):
        call_each(s, "before_clip", s.runtime.parameters())
        s.runtime.remeasure()


def call_member(s: Session, place: str, call: Callable[..., T], *arguments: object) -> T | None:
    """Return the result of a method of a callback or a check.

    An exception of a check becomes a note, with result None; a callback's exception is raised, with its name added.
    """
    try:
        with _mark_calls(place):
            return call(*arguments)
    except RAISED as error:
        why = _explain_failure(s, place, error)
        if s.comms.rank == 0:
            s.notes.append(why)
        elif why not in s.untold:
            s.untold[why] = False
        return None


def _explain_failure(s: Session, place: str, error: BaseException) -> str:
    """Return a check's exception as text; raise a callback's exception again, with the callback's name."""
    if isinstance(s.members[place], HealthCheck):
        return f"{format_choice(place)} failed: {type(error).__name__}: {error}"
    raise _add_name(place, error)


def _add_name(place: str, error: BaseException) -> BaseException:
    """Return the error with the name of the callback or check that raised it."""
    if isinstance(error, UserError):
        return UserError(f"{format_choice(place)}: {error.what}", *error.details)
    error.add_note(f"raised by {format_choice(place)}")
    part = vars(error).get("raised_in", "")
    vars(error)["raised_by"] = f"{place}/{part}" if part else place  # read by the code that restarts the ranks
    return error


def call_together(s: Session, place: str, call: Callable[..., T], *arguments: object) -> T:
    """Return the result of a method that all ranks call together, with collectives in it.

    Raises the method's exception with the name of the callback or check, also for a check: a rank that continued alone
    would start a new collective while the other ranks still wait in the old one.
    """
    try:
        with _mark_calls(place):
            return call(*arguments)
    except RAISED as error:
        with_name = _add_name(place, error)
        if with_name is error:  # an error must not become its own cause
            raise
        raise with_name from error


@contextmanager
def _mark_calls(place: str) -> Iterator[None]:
    """Record in the pulse whose code the block runs, so that a watcher can name a callback or check that hangs."""
    pulse = get_current()
    before = pulse.call(place)
    try:
        yield
    finally:
        pulse.call(before)


def take_failures(s: Session) -> list[Verdict]:
    """Return verdicts on exceptions of checks on this rank, each once, for rank 0 to report to the user."""
    new = [why for why, reported in s.untold.items() if not reported]
    s.untold |= dict.fromkeys(new, True)
    return [Verdict("check-failed", f"rank {s.comms.rank}", 1.0, why, Action.WARN) for why in new]


def tell_of_error(s: Session, error: BaseException) -> None:
    """Call `on_error` of every callback and check; their exceptions become notes of `error`."""
    for place, member in s.members.items():
        try:
            member.on_error(error)
        except RAISED as another:
            error.add_note(f"on_error of {format_choice(place)} failed: {type(another).__name__}: {another}")


def format_choice(place: str) -> str:
    """Return a place "callback/ema" in the form of an override: "callback=ema"."""
    return place.replace("/", "=", 1)


def iterate_lent_weights(s: Session) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """Yield ("ema/0.999", context in which the run has these weights) for each weight set of a callback.

    Raises ValueError for a name of `Callback.list_validated_weights` that has no arrays.
    """
    for place, member in s.members.items():
        for label in call_member(s, place, member.list_validated_weights) or ():
            prefix = f"{place}/{label}/"
            missing = [name for name in s.runtime.names() if f"{prefix}{name}" not in (member.registry or ())]
            if missing:
                raise ValueError(
                    f"{format_choice(place)} lists weights {label!r}, but the array {prefix}{missing[0]} is missing"
                )
            yield f"{place.partition('/')[2]}/{label}", lend_weights(s.runtime, prefix, list(member.shards()))


@contextmanager
def lend_weights(runtime: Runtime, prefix: str, shards: list[Shard]) -> Iterator[None]:
    """Replace each `model/<name>` by the array `<prefix><name>`, if there is one, in the block. Called on all ranks.

    Arrays of equal dtype are swapped in place, which needs no third copy of all weights.
    """
    theirs = {(shard.name.removeprefix(prefix), shard.box): shard.local for shard in shards}
    pairs = [
        (weight.local.detach(), other)
        for weight in runtime.shards()
        if (other := theirs.get((parse_parameter(weight.name), weight.box))) is not None
    ]
    swapped = [(weight, other) for weight, other in pairs if weight.dtype == other.dtype]
    copied = [(weight, weight.clone(), other) for weight, other in pairs if weight.dtype != other.dtype]
    _swap(swapped)
    try:
        for weight, _, other in copied:
            weight.copy_(other)
        yield
    finally:
        _swap(swapped)
        for weight, own, _ in copied:
            weight.copy_(own)


def _swap(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for weight, other in pairs:
        own = weight.clone()
        weight.copy_(other)
        other.copy_(own)
