"""Purposes of collectives: the code that starts one marks it, and a part that wraps a `Comm` reads the mark.

    with mark_traffic("gradients"):
        pending = reduction.reduce(bucket, comm)

A mark is of the thread and of what it calls, so it also holds for collectives that a part starts which knows no marks:
a reduction of gradients sends nothing but gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal

Purpose = Literal["gradients", "weights", "tokens", "loss", "norm", "other"]

_PURPOSE: ContextVar[Purpose] = ContextVar("purpose", default="other")


@contextmanager
def mark_traffic(purpose: Purpose) -> Iterator[None]:
    """Mark the collectives that are started in this block, or in a function that is decorated with it.

    gradients  sums of gradients, over whatever axis
    weights    weights that are gathered for a forward or backward pass, or copied to where they are used too
    tokens     numbers of valid tokens
    loss       sums of losses, and what modules emitted with them
    norm       the norm of the gradients
    other      everything else: activations, what ranks agree on, checkpoints
    """
    before = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(before)


def get_purpose() -> Purpose:
    """What a collective that is started now is for."""
    return _PURPOSE.get()


__all__ = ["Purpose", "get_purpose", "mark_traffic"]
