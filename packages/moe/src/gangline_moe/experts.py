"""Experts of a layer: gated feed-forwards whose weights are stacked, each applied to its contiguous rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gangline.model import forward_context
from gangline.model.build import construct
from gangline.precision import Precision
from gangline_basics.model.feed_forward import apply_gate
from gangline_basics.model.gating import Gating
from gangline_moe.gated import compute_gradients, join
from gangline_moe.matmuls import GroupedMatmuls, PlainMatmuls, choose_matmuls
from gangline_moe.nodes import ExpertsNode, StackNode


class Stack(nn.Module):
    """Grouped linear of all experts: rows (A, I), sorted by expert -> x W_e^T + b_e of each row's expert e, (A, O).

    An expert-parallel rank holds a shard of the experts, so their number is read from the weight (E, O, I). Biases are
    (E, O).
    """

    def __init__(self, node: StackNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.experts, node.out_features, node.in_features))
        self.bias = nn.Parameter(torch.empty(node.experts, node.out_features)) if node.bias else None
        self.matmuls: GroupedMatmuls = PlainMatmuls()

    def set_precision(self, precision: Precision) -> None:
        """Choose the matmuls for a precision. Called once, before the first matmul."""
        self.matmuls = choose_matmuls(precision)

    def forward(self, x_AI: Tensor, bounds: Tensor) -> Tensor:
        return StackMatmul.apply(x_AI, self.weight, self.bias, bounds, self.matmuls)


class Experts(nn.Module):
    """Gated feed-forward of all experts: rows (A, D), sorted by expert -> W_down gated(W_gate x, W_up x), (A, D).

    Uses one autograd function that saves few activations, or separate matmuls if an edit wraps stacked weights or the
    activation is not silu.
    """

    def __init__(self, node: ExpertsNode) -> None:
        super().__init__()
        self.w_gate, self.w_up = construct(node.w_gate), construct(node.w_up)
        self.w_down, self.gating = construct(node.w_down), node.gating

    def forward(self, x_AD: Tensor, bounds: Tensor) -> Tensor:
        stacks = self.w_gate, self.w_up, self.w_down
        if self.gating.activation == "silu" and all(type(stack) is Stack for stack in stacks):
            weights, biases = (stack.weight for stack in stacks), (stack.bias for stack in stacks)
            return GatedMatmuls.apply(x_AD, *weights, *biases, bounds, self.w_gate.matmuls, self.gating)
        return self.w_down(apply_gate(self.gating, self.w_gate(x_AD, bounds), self.w_up(x_AD, bounds)), bounds)


def add_expert_bias(y_AO: Tensor, bias_EO: Tensor | None, bounds: Tensor) -> Tensor:
    """Add the bias of each row's expert to `y_AO` in place; return `y_AO`."""
    if bias_EO is None or y_AO.is_meta or not len(y_AO):
        return y_AO
    return y_AO.add_(bias_EO.repeat_interleave(bounds.diff(), dim=0, output_size=len(y_AO)).to(y_AO.dtype))


def compute_bias_gradient(dy_AO: Tensor, bias_EO: Tensor, bounds: Tensor) -> Tensor:
    """Return the sum of each expert's gradient rows, (E, O), accumulated in float32 or wider, in the bias's dtype."""
    if dy_AO.is_meta or not len(dy_AO):
        return torch.zeros_like(bias_EO)
    wide = dy_AO.to(torch.promote_types(dy_AO.dtype, torch.float32))
    return torch.segment_reduce(wide, "sum", lengths=bounds.diff(), unsafe=True).to(bias_EO.dtype)


class StackMatmul(torch.autograd.Function):
    """Grouped matmul with stacked weights. The input is saved only if the weights are trained."""

    @staticmethod
    def forward(
        ctx, x_AI: Tensor, weight: Tensor, bias: Tensor | None, bounds: Tensor, matmuls: GroupedMatmuls
    ) -> Tensor:
        ctx.matmuls, ctx.weight, ctx.bias = matmuls, weight, bias
        ctx.save_for_backward(weight, bounds, *([x_AI] if ctx.needs_input_grad[1] else []))
        return add_expert_bias(matmuls.multiply_rows(x_AI, weight, bounds), bias, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_AO: Tensor):
        weight, bounds, *inputs = ctx.saved_tensors
        need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
        matmuls: GroupedMatmuls = ctx.matmuls
        dy_AO, dweight = dy_AO.contiguous(), None
        dbias = compute_bias_gradient(dy_AO, ctx.bias, bounds) if need_bias else None
        if need_weight:
            dweight = forward_context.return_weight_gradient(
                ctx.weight, lambda: matmuls.compute_grad_w(dy_AO, inputs[0], bounds)
            )
        return matmuls.compute_grad_x(dy_AO, weight, bounds) if need_x else None, dweight, dbias, None, None


class GatedMatmuls(torch.autograd.Function):
    """Compute W_down gated(W_gate x, W_up x). Only x and the outputs of W_gate and W_up are saved.

    The parameters are kept in `ctx` next to the saved tensors, as `forward_context.return_weight_gradient` requires.
    """

    @staticmethod
    def forward(
        ctx,
        x_AD: Tensor,
        w_gate: Tensor,
        w_up: Tensor,
        w_down: Tensor,
        b_gate: Tensor | None,
        b_up: Tensor | None,
        b_down: Tensor | None,
        bounds: Tensor,
        matmuls: GroupedMatmuls,
        gating: Gating,
    ) -> Tensor:
        ctx.matmuls, ctx.gating = matmuls, gating
        ctx.weights, ctx.biases = (w_gate, w_up, w_down), (b_gate, b_up, b_down)
        gate_AH = add_expert_bias(matmuls.multiply_rows(x_AD, w_gate, bounds), b_gate, bounds)
        up_AH = add_expert_bias(matmuls.multiply_rows(x_AD, w_up, bounds), b_up, bounds)
        ctx.save_for_backward(x_AD, gate_AH, up_AH, w_gate, w_up, w_down, bounds)
        joined_AH = join(gating, gate_AH, up_AH)
        return add_expert_bias(matmuls.multiply_rows(joined_AH, w_down, bounds), b_down, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_AD: Tensor):
        x_AD, gate_AH, up_AH, w_gate, w_up, w_down, bounds = ctx.saved_tensors
        need_x, *need = ctx.needs_input_grad[:7]
        matmuls: GroupedMatmuls = ctx.matmuls
        dy_AD = dy_AD.contiguous()

        def compute_weight_gradient(index: int, dy: Tensor, x: Tensor) -> Tensor | None:
            if not need[index]:
                return None
            return forward_context.return_weight_gradient(
                ctx.weights[index], lambda: matmuls.compute_grad_w(dy, x, bounds)
            )

        dh_AH = matmuls.compute_grad_x(dy_AD, w_down, bounds)
        joined_AH, dgate_AH, dup_AH = compute_gradients(ctx.gating, gate_AH, up_AH, dh_AH)
        dw_down = compute_weight_gradient(2, dy_AD, joined_AH)
        del joined_AH
        dw_gate = compute_weight_gradient(0, dgate_AH, x_AD)
        dw_up = compute_weight_gradient(1, dup_AH, x_AD)
        biases = zip(ctx.biases, need[3:], (dgate_AH, dup_AH, dy_AD), strict=True)
        db = [compute_bias_gradient(dy, bias, bounds) if needed else None for bias, needed, dy in biases]
        dx_AD = None
        if need_x:
            dx_AD = matmuls.compute_grad_x(dgate_AH, w_gate, bounds)
            dx_AD += matmuls.compute_grad_x(dup_AH, w_up, bounds)
        return dx_AD, dw_gate, dw_up, dw_down, *db, None, None, None
