"""Gradients of weights that are computed outside of autograd's own accumulation: at once, or deferred.

Column- and row-parallel products compute dW while dX travels, and a zero-bubble schedule (arXiv 2401.10241) computes it
while its rank would wait, so neither can return it to autograd:

    with store.open(chunk, microbatch):     # I: closures that layers `defer` are kept
        output.backward(gradient)
    store.run(chunk, microbatch)            # W: they run, in the order in which they came

Modules of other packages reach it by `inside.weight_gradient`. Which store is open is one value of the module, no
context variable: autograd runs the backward pass of a GPU in a thread of its own, to which a context variable does not
travel.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from gangline import inside

Closure = Callable[[], None]

_open: deque[Closure] | None = None  # where `defer` keeps closures


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


def when_accumulated(parameter: nn.Parameter, call: Callable[[Tensor], None]) -> None:
    """Have `call(parameter)` called after each gradient that is added to it, by autograd or by `accumulate_grad`."""

    def accumulated(weight: Tensor) -> None:
        if weight.grad is not None:  # else autograd passed without one: it is deferred
            call(weight)

    parameter.register_post_accumulate_grad_hook(accumulated)
    parameter._accumulated = accumulated  # type: ignore[attr-defined]  # kept there: both are collected together


def defer(closure: Closure) -> None:
    """Run `closure` now, or keep it where a store is open."""
    if _open is None:
        closure()
    else:
        _open.append(closure)


def deferring() -> bool:
    """Whether a store is open: weight gradients of the backward pass under way come later."""
    return _open is not None


class WeightGradStore:
    """Deferred weight gradients, by chunk and microbatch."""

    def __init__(self) -> None:
        self._closures: dict[tuple[int, int], deque[Closure]] = defaultdict(deque)

    @contextmanager
    def open(self, chunk: int, microbatch: int) -> Iterator[None]:
        """Keep what is deferred meanwhile. Raises RuntimeError where a store is open."""
        global _open
        if _open is not None:
            raise RuntimeError("a store of weight gradients is open already")
        _open = self._closures[chunk, microbatch]
        try:
            with inside.deferring(_keep):
                yield
        finally:
            _open = None

    def run(self, chunk: int, microbatch: int) -> None:
        """Run what was kept, in the order in which it came, and let go of each closure once it has run."""
        closures = self._closures.pop((chunk, microbatch), deque[Closure]())
        while closures:
            closures.popleft()()

    def clear(self) -> None:
        """Forget what a step that failed has left."""
        self._closures.clear()

    def __len__(self) -> int:
        """How many closures are kept."""
        return sum(map(len, self._closures.values()))


def _keep(weight: Tensor, compute: Callable[[], Tensor]) -> None:
    defer(lambda: accumulate_grad(weight, compute()))
