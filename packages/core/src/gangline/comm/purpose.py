"""Purposes of collectives: the code that starts one marks it, and a part that wraps a `Comm` reads the mark.

    with mark_traffic("gradients"):
        pending = reduction.reduce(bucket, comm)

A mark holds for the thread and all that it calls, so it includes collectives of a part that does not set marks: a
reduction of gradients sends only gradients.
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
    weights    weights that are gathered for a forward or backward pass, or copied to where they are used as well
    tokens     numbers of valid tokens
    loss       sums of losses, and values that modules emitted
    norm       the norm of the gradients
    other      everything else: activations, the sync of ranks, checkpoints
    """
    before = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(before)


def get_purpose() -> Purpose:
    """Return the purpose of a collective that is started now."""
    return _PURPOSE.get()


__all__ = ["Purpose", "get_purpose", "mark_traffic"]
