"""Gradients of weights that are computed outside of autograd's own accumulation: at once, or deferred.

A module that computes dW while something else travels, and a zero-bubble pipeline (arXiv 2401.10241), which computes it
while its rank would wait, cannot return it to autograd. A strategy that defers opens `defer_gradients` around a
backward pass and runs what it was given later, in the same order.

Where closures are kept is one value of the module, no context variable: autograd runs the backward pass of a GPU in a
thread of its own, to which a context variable does not travel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

Closure = Callable[[], None]

_keep: Callable[[Closure], None] | None = None


@contextmanager
def defer_gradients(keep: Callable[[Closure], None]) -> Iterator[None]:
    """Weight gradients of the backward pass inside are deferred: `keep` is given what computes each of them.

    Raises RuntimeError inside another one.
    """
    global _keep
    if _keep is not None:
        raise RuntimeError("weight gradients are deferred already")
    _keep = keep
    try:
        yield
    finally:
        _keep = None


def is_deferring() -> bool:
    """Whether weight gradients of the backward pass under way come later."""
    return _keep is not None


def defer(closure: Closure) -> None:
    """Run `closure` now, or give it to whoever is deferring."""
    if _keep is None:
        closure()
    else:
        _keep(closure)


@torch.no_grad()
def accumulate_grad(weight: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `weight.grad` as autograd would, in the weight's `grad_dtype`, and call what waits for it."""
    assert isinstance(weight, nn.Parameter)  # not what a recomputed forward pass was handed instead
    dtype = weight.grad_dtype or weight.dtype
    if weight.grad is None:
        weight.grad = gradient.to(dtype)
    else:
        weight.grad.add_(gradient.to(dtype))
    accumulated: Callable[[Tensor], None] | None = getattr(weight, "_accumulated", None)
    if accumulated is not None:
        accumulated(weight)


def call_when_accumulated(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
    """Have `call(parameter)` called after each gradient that is added to it, by autograd or by `accumulate_grad`."""

    def notify(weight: Tensor) -> None:
        if weight.grad is not None:  # else autograd passed without one: it is deferred
            call(weight)

    parameter.register_post_accumulate_grad_hook(notify)
    parameter._accumulated = notify  # type: ignore[attr-defined]  # kept there: both are collected together
