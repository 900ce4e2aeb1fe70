"""Weight gradients computed outside of autograd's own accumulation: at once, or deferred.

A module that computes dW during a transfer cannot return dW to autograd; nor can a zero-bubble pipeline (arXiv
2401.10241), which computes dW while its rank would wait. A strategy that defers gradients opens `defer_gradients`
around a backward pass and runs the collected closures later, in order.

The receiver of closures is a global, not a context variable: on a GPU autograd runs the backward pass in another
thread, which does not see context variables.
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
    """Defer the weight gradients of a backward pass in the block: pass a closure for each gradient to `keep`.

    Raises RuntimeError if nested.
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
    """Return whether weight gradients of the current backward pass are deferred."""
    return _keep is not None


def defer(closure: Closure) -> None:
    """Run `closure` now or, within `defer_gradients`, pass it to `keep`."""
    if _keep is None:
        closure()
    else:
        _keep(closure)


@torch.no_grad()
def accumulate_grad(weight: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `weight.grad` as autograd would, in the weight's `grad_dtype`, and call the weight's hook."""
    assert isinstance(weight, nn.Parameter)  # not the tensor that recomputation returns in its place
    dtype = weight.grad_dtype or weight.dtype
    if weight.grad is None:
        weight.grad = gradient.to(dtype)
    else:
        weight.grad.add_(gradient.to(dtype))
    accumulated: Callable[[Tensor], None] | None = getattr(weight, "_accumulated", None)
    if accumulated is not None:
        accumulated(weight)


def call_when_accumulated(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
    """Call `call(parameter)` after each gradient accumulation, by autograd or by `accumulate_grad`."""

    def notify(weight: Tensor) -> None:
        if weight.grad is not None:  # None: the gradient is deferred
            call(weight)

    parameter.register_post_accumulate_grad_hook(notify)
    parameter._accumulated = notify  # type: ignore[attr-defined]  # the garbage collector frees both together
