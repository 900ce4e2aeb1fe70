"""Matmuls inside a tensor-parallel region, on local tensors without communication. The formulas are in `region`."""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.model.weight_grads import accumulate_grad, defer
from gangline_parallel_megatron_style.tensor.rows import from_rows, to_rows
from gangline_parallel_megatron_style.tensor.setting import Setting, is_trained
from gangline_parallel_megatron_style.tensor.shared_input import PendingMatmul, SharedInput

Weights = tuple[Tensor, Tensor | None]  # weight and bias; a tuple hides them from autograd


class Column(torch.autograd.Function):
    """Autograd function X (N, D), W (F, D) -> Y (N, F). Backward stores dY in `SharedInput` for `Enter.backward`."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, anchor: Tensor | None, weights: Weights, shared_input: SharedInput) -> Tensor:
        ctx.shared_input, ctx.order, ctx.weights = shared_input, shared_input.matmul_count, weights
        ctx.set_materialize_grads(False)
        if anchor is not None:  # x needs no gradient, so `Enter` has no backward pass
            ctx.save_for_backward(x_ND)
        return shared_input.setting.precision.linear(x_ND, *weights)

    @staticmethod
    def backward(ctx, dy_NF: Tensor | None):
        if dy_NF is not None:
            shared_input: SharedInput = ctx.shared_input
            matmul = PendingMatmul(ctx.order, dy_NF, *ctx.weights)
            if ctx.needs_input_grad[0]:
                shared_input.pending.append(matmul)
            else:
                (x_ND,) = ctx.saved_tensors
                defer(lambda: matmul.accumulate(shared_input.setting, x_ND))
        return None, None, None, None


class Row(torch.autograd.Function):
    """Autograd function X (B, T, F), A (D, F) -> P (N, D), this rank's part of the sum over tp.

    X is saved in the shape (B, T, F), because the operator that made X may save the same tensor: one tensor in memory.
    If the rows of X are not a view, the backward pass copies them again.
    """

    @staticmethod
    def forward(ctx, x: Tensor, anchor: Tensor | None, weights: Weights, setting: Setting) -> Tensor:
        ctx.setting, (ctx.w, _), ctx.dtype, ctx.shape = setting, weights, x.dtype, x.shape
        ctx.set_materialize_grads(False)
        x = x.to(setting.precision.compute_dtype)
        if is_trained(ctx.w):
            ctx.save_for_backward(x)
        return setting.precision.linear(to_rows(x, setting.sequence_parallel), ctx.w)

    @staticmethod
    def backward(ctx, dy_ND: Tensor | None):
        if dy_ND is None:
            return None, None, None, None
        setting: Setting = ctx.setting
        w, precision, tokens_first = ctx.w, setting.precision, setting.sequence_parallel
        dx = None
        if ctx.needs_input_grad[0]:
            dx = from_rows(precision.compute_grad_x(dy_ND, w), ctx.shape, tokens_first).to(ctx.dtype)
        if is_trained(w):
            (x,) = ctx.saved_tensors
            defer(lambda: accumulate_grad(w, precision.compute_grad_w(dy_ND, to_rows(x, tokens_first))))
        return dx, None, None, None
