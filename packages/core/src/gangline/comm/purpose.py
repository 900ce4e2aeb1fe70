"""Purposes of collectives: code that starts a collective marks it, and a part that wraps a `Comm` reads the mark.

    with mark_traffic("gradients"):
        pending = reduction.reduce(bucket, comm)

A mark holds for all collectives that the thread starts within the block, in any code: here, all traffic of the gradient
reduction is marked "gradients".
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
    """Mark the collectives that start in the block, or in a function with this decorator.

    gradients  sums of gradients, over any axis
    weights    weights that are gathered for a forward or backward pass, or copied to other ranks that use them
    tokens     numbers of valid tokens
    loss       sums of losses, and values that modules emitted
    norm       norm of the gradients
    other      all other traffic: activations, sync of ranks, checkpoints
    """
    before = _PURPOSE.set(purpose)
    try:
        yield
    finally:
        _PURPOSE.reset(before)


def get_purpose() -> Purpose:
    """Return the current mark: the purpose of a collective that starts now."""
    return _PURPOSE.get()


__all__ = ["Purpose", "get_purpose", "mark_traffic"]
