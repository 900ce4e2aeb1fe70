"""Linear layer whose backward pass is split into input and weight gradients, which may run at different times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gangline.model.weight_grads import accumulate_grad, defer
from gangline.precision import Precision


class SplitMatmul(torch.autograd.Function):
    """Autograd function y = x Wᵀ + b in a precision: x (..., in); leaves W (out, in) and b (out,).

        I:  dx = dy W                          returned to autograd
        W:  dW = dyᵀ x,  db = sum of dy        accumulated now, or deferred if a store is open

    Saves x if W is trained. W and b are plain attributes, not saved tensors: activation recomputation may return other
    tensors than were saved, and the gradients belong to the original W and b. Bitwise equal to autograd's backward of
    `F.linear`.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, precision: Precision) -> Tensor:
        ctx.save_for_backward(*([x] if ctx.needs_input_grad[1] else []))
        ctx.w, ctx.b, ctx.precision, ctx.dtype = w, b, precision, x.dtype
        return precision.linear(x, w, b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, None, None]:
        w, b, precision = ctx.w, ctx.b, ctx.precision
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        saved_tensors = ctx.saved_tensors

        @torch.no_grad()  # a deferred call is outside of autograd, and a graph would keep x alive
        def accumulate_weight_grads() -> None:
            if need_w:
                (x,) = saved_tensors
                accumulate_grad(w, precision.compute_grad_w(dy, x))
            if need_b:
                accumulate_grad(b, dy.flatten(0, -2).sum(0))

        if need_w or need_b:
            defer(accumulate_weight_grads)
        return precision.compute_grad_x(dy, w).to(ctx.dtype) if need_x else None, None, None, None


def split_linear(precision: Precision) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return a function (x, W, b) -> y with a split backward pass, for `Linear.matmul`."""

    def multiply(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return SplitMatmul.apply(x, w, b, precision)

    return multiply
