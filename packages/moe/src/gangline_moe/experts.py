"""The experts of a layer: gated feed-forwards (SwiGLU), stacked, each for a run of rows."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gangline import forward_context
from gangline.model import construct
from gangline.precision import Precision
from gangline_moe.nodes import ExpertsNode, StackNode
from gangline_moe.products import PlainProducts, Products, products_of


class Stack(nn.Module):
    """rows (A, I), expert by expert -> each times its expert's matrix transposed, (A, O).

    A rank of the fold holds some of the experts: their number is read from the weight (E, O, I).
    """

    def __init__(self, node: StackNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.experts, node.out_features, node.in_features))
        self.products: Products = PlainProducts()

    def multiply_by(self, precision: Precision) -> None:
        """Called once, before the first product."""
        self.products = products_of(precision)

    def forward(self, x_AI: Tensor, bounds: Tensor) -> Tensor:
        return StackProduct.apply(x_AI, self.weight, bounds, self.products)


class Experts(nn.Module):
    """rows (A, D), expert by expert -> W_down (silu(W_gate x) · W_up x), (A, D).

    One autograd function that keeps little; product by product where an edit has wrapped one of them.
    """

    def __init__(self, node: ExpertsNode) -> None:
        super().__init__()
        self.w_gate, self.w_up = construct(node.w_gate), construct(node.w_up)
        self.w_down = construct(node.w_down)

    def forward(self, x_AD: Tensor, bounds: Tensor) -> Tensor:
        stacks = self.w_gate, self.w_up, self.w_down
        if all(type(stack) is Stack for stack in stacks):
            return GatedProducts.apply(x_AD, *(stack.weight for stack in stacks), bounds, self.w_gate.products)
        return self.w_down(F.silu(self.w_gate(x_AD, bounds)) * self.w_up(x_AD, bounds), bounds)


class StackProduct(torch.autograd.Function):
    """One product. x is kept only where the weight is trained."""

    @staticmethod
    def forward(ctx, x_AI: Tensor, weight: Tensor, bounds: Tensor, products: Products) -> Tensor:
        ctx.products, ctx.weight = products, weight
        ctx.save_for_backward(weight, bounds, *([x_AI] if ctx.needs_input_grad[1] else []))
        return products.rows(x_AI, weight, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_AO: Tensor):
        weight, bounds, *kept = ctx.saved_tensors
        need_x, need_weight, *_ = ctx.needs_input_grad
        products: Products = ctx.products
        dy_AO, dweight = dy_AO.contiguous(), None
        if need_weight:
            dweight = forward_context.weight_gradient(ctx.weight, lambda: products.outer(dy_AO, kept[0], bounds))
        return products.back(dy_AO, weight, bounds) if need_x else None, dweight, None, None


class GatedProducts(torch.autograd.Function):
    """W_down (silu(W_gate x) · W_up x). Kept are x and the two products before the gate; the rest is computed again.

    The parameters are kept in `ctx` beside the saved tensors, as `forward_context.weight_gradient` asks.
    """

    @staticmethod
    def forward(
        ctx, x_AD: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, bounds: Tensor, products: Products
    ) -> Tensor:
        ctx.products, ctx.weights = products, (w_gate, w_up, w_down)
        gate_AH, up_AH = products.rows(x_AD, w_gate, bounds), products.rows(x_AD, w_up, bounds)
        ctx.save_for_backward(x_AD, gate_AH, up_AH, w_gate, w_up, w_down, bounds)
        return products.rows(F.silu(gate_AH).mul_(up_AH), w_down, bounds)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_AD: Tensor):
        x_AD, gate_AH, up_AH, w_gate, w_up, w_down, bounds = ctx.saved_tensors
        need_x, need_gate, need_up, need_down, *_ = ctx.needs_input_grad
        products: Products = ctx.products
        dy_AD = dy_AD.contiguous()
        active_AH = F.silu(gate_AH)

        def weight_gradient(needed: bool, weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
            return forward_context.weight_gradient(weight, lambda: products.outer(dy, x, bounds)) if needed else None

        dw_down = weight_gradient(need_down, ctx.weights[2], dy_AD, active_AH * up_AH)
        dh_AH = products.back(dy_AD, w_down, bounds)
        dup_AH = active_AH.mul_(dh_AH)
        dgate_AH = torch.ops.aten.silu_backward(dh_AH.mul_(up_AH), gate_AH)
        dw_gate = weight_gradient(need_gate, ctx.weights[0], dgate_AH, x_AD)
        dw_up = weight_gradient(need_up, ctx.weights[1], dup_AH, x_AD)
        dx_AD = None
        if need_x:
            dx_AD = products.back(dgate_AH, w_gate, bounds)
            dx_AD += products.back(dup_AH, w_up, bounds)
        return dx_AD, dw_gate, dw_up, dw_down, None, None
