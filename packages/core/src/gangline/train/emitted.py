"""Metrics that callbacks and health checks return: numbers, equal on every rank."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from numbers import Real
from typing import Any

from gangline.comm.objects import gather_json
from gangline.train.session import Session

Emitted = dict[str, float | list[float]]


def read_metrics(choice: str, metrics: object) -> Emitted:
    """Return the metrics from `after_step` or `after_validation` of a callback or check, as plain numbers.

    choice: the callback or check in the user's words, "callback=ema". Raises TypeError for other values.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise TypeError(f"{choice} returned {metrics!r}; metrics must be a dict of names and numbers")
    return {str(name): _convert_number(choice, str(name), value) for name, value in metrics.items()}


def _convert_number(choice: str, name: str, value: Any) -> float | list[float]:
    if isinstance(value, list | tuple):
        return [float(_convert_number(choice, name, one)) for one in value]  # type: ignore[arg-type]
    if not isinstance(value, Real):
        raise TypeError(f"{choice} returned {value!r} as metric {name!r}; expected a number or a list of numbers")
    return value if isinstance(value, int) else float(value)


def hash_metrics(metrics: Emitted) -> float:
    """Return a 48-bit hash of metrics, which a float64 represents exactly; 0 without metrics."""
    if not metrics:
        return 0.0
    content = json.dumps({name: _describe_type(value) for name, value in metrics.items()}, sort_keys=True)
    return float(int.from_bytes(hashlib.blake2b(content.encode(), digest_size=6).digest()))


def _describe_type(value: float | list[float]) -> str | list[str]:
    return [repr(float(one)) for one in value] if isinstance(value, list) else repr(float(value))


def match_metrics(s: Session, metrics: Emitted) -> bool:
    """Return whether all ranks have the same metrics, by an all-gather; in a step `agree` does so."""
    return len(set(gather_json(s.comms.world, hash_metrics(metrics)))) == 1


def refuse_unlike(s: Session, metrics: Emitted) -> None:
    """Raise ValueError on every rank, with the callback or check and its values; called if metric hashes differ."""
    everyone = gather_json(s.comms.world, {name: _describe_type(value) for name, value in metrics.items()})
    for name in dict.fromkeys(name for one in everyone for name in one):
        values = [one.get(name, "nothing") for one in everyone]
        odd = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if odd is not None:
            member, _, metric = name.partition("/")
            kind = "callback" if member in s.callbacks else "health"
            raise ValueError(
                f"{kind}={member} returned {values[odd]} as its metric {metric!r} on rank {odd} and {values[0]} on "
                "rank 0; metrics must be equal on all ranks: reduce the metric over the ranks, or remove it"
            )
