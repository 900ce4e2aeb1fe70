"""Core's side of callbacks and health checks: one way to call them, and to say whose mistake an exception is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TypeVar

import torch

from gangline.callback import Metrics
from gangline.errors import UserError
from gangline.health import HealthCheck
from gangline.runtime import Runtime
from gangline.shard import Shard
from gangline.train.session import Session

T = TypeVar("T")


def attach(s: Session) -> None:
    """Give every callback and check its place and what the run is made of; refuse arrays under a foreign name."""
    for place, member in s.members.items():
        member.place = place
        named(s, place, member.attach, s.runtime, s.comms, s.comms.store, s.device)
        strange = [
            name
            for name in chain(member.registry or (), (shard.name for shard in member.shards()))
            if not name.startswith(f"{place}/")
        ]
        if strange:
            raise ValueError(f"{choice(place)} names an array {strange[0]!r}; its names begin with {place}/")


def each(s: Session, event: str, *arguments: object) -> dict[str, float | list[float]]:
    """Call `event` of every callback and then of every check, as they were chosen; their metrics under their names."""
    found: dict[str, float | list[float]] = {}
    for place, member in s.members.items():
        metrics: Metrics | None = named(s, place, getattr(member, event), *arguments)
        name = place.partition("/")[2]
        found |= {f"{name}/{metric}": value for metric, value in (metrics or {}).items()}
    return found


def named(s: Session, place: str, call: Callable[..., T], *arguments: object) -> T | None:
    """What a method of a callback or a check gives.

    What a check raises is a note, ends nothing and gives None; what a callback raises ends the run, with its name.
    """
    try:
        return call(*arguments)
    except Exception as error:
        if isinstance(s.members[place], HealthCheck):
            s.notes.append(f"{choice(place)} failed: {type(error).__name__}: {error}")
            return None
        if isinstance(error, UserError):
            raise UserError(f"{choice(place)}: {error.what}", *error.details) from error
        error.add_note(f"raised by {choice(place)}")
        raise


def tell_of_error(s: Session, error: BaseException) -> None:
    """Every callback and check may let go of what it holds; what that raises must not hide the first error."""
    for place, member in s.members.items():
        try:
            member.on_error(error)
        except Exception as another:
            error.add_note(f"{choice(place)} failed while it was told: {type(another).__name__}: {another}")


def choice(place: str) -> str:
    """ "callback/ema" as a user chose it."""
    return place.replace("/", "=", 1)


def lendings(s: Session) -> Iterator[tuple[str, AbstractContextManager[None]]]:
    """("ema/0.999", what to be within while the run's weights are to be those), for all that callbacks lend."""
    for place, member in s.members.items():
        for label in named(s, place, member.lends) or ():
            prefix = f"{place}/{label}/"
            missing = [name for name in s.runtime.names() if f"{prefix}{name}" not in (member.registry or ())]
            if missing:
                raise ValueError(f"{choice(place)} lends {label!r}, but has no array {prefix}{missing[0]}")
            yield f"{place.partition('/')[2]}/{label}", lent(s.runtime, prefix, list(member.shards()))


@contextmanager
def lent(runtime: Runtime, prefix: str, shards: list[Shard]) -> Iterator[None]:
    """Within, every `model/<name>` for which there is `<prefix><name>` holds its values, on all ranks.

    Where the dtypes are equal the two swap in place, so that no third copy is needed.
    """
    theirs = {(shard.name.removeprefix(prefix), shard.box): shard.local for shard in shards}
    pairs = [
        (weight.local.detach(), other)
        for weight in runtime.shards()
        if (other := theirs.get((weight.name.removeprefix("model/"), weight.box))) is not None
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
