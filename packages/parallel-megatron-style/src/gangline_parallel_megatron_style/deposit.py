"""Handing over a weight gradient that was computed outside of autograd's own accumulation.

Column- and row-parallel products compute dW while dX travels, and a zero-bubble schedule puts dW off, so neither can
return it to autograd.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def deposit(weight: Tensor, gradient: Tensor) -> None:
    """Add `gradient` to `weight.grad` as autograd would, in the weight's `grad_dtype`, and tell who waits for it.

    Who waits has set `weight.deposited`, a callable without arguments.
    """
    kept = weight.grad_dtype or weight.dtype
    if weight.grad is None:
        weight.grad = gradient.to(kept)
    else:
        weight.grad.add_(gradient.to(kept))
    told = getattr(weight, "deposited", None)
    if told is not None:
        told()
