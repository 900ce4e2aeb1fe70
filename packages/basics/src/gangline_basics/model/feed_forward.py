"""Gated feed-forward layer: SwiGLU, GEGLU (Shazeer, arXiv 2002.05202, section 2), and SwiGLU with clamped inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gangline.model.build import construct
from gangline_basics.model.decoder_nodes import FeedForwardNode
from gangline_basics.model.gating import Gating

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


def apply_gate(gating: Gating, gate: Tensor, up: Tensor) -> Tensor:
    """Return the elementwise gated product that `Gating` defines, in the shape of `gate` and `up`."""
    if gating.plain:
        return ACTIVATIONS[gating.activation](gate) * up
    return BoundedGate.apply(gating, gate, up)


def bound_gate(gating: Gating, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (clamped gate, sigmoid(slope · clamped gate), clamped up + offset)."""
    if gating.limit is not None:
        gate, up = gate.clamp(max=gating.limit), up.clamp(-gating.limit, gating.limit)
    return gate, torch.sigmoid(gating.slope * gate), up + gating.offset


def bound_gradients(gating: Gating, gate: Tensor, up: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up from `dy`, for a gating that is not plain; 0 beyond the limit."""
    g, s, u = bound_gate(gating, gate, up)
    dgate, dup = dy * u * s * (1 + gating.slope * g * (1 - s)), dy * g * s
    if gating.limit is not None:
        dgate = dgate.masked_fill(gate > gating.limit, 0.0)
        dup = dup.masked_fill(up.abs() > gating.limit, 0.0)
    return dgate, dup


class BoundedGate(torch.autograd.Function):
    """gate · sigmoid(slope · gate) · (up + offset), with gate and up clamped; backward needs only gate and up."""

    @staticmethod
    def forward(ctx, gating: Gating, gate: Tensor, up: Tensor) -> Tensor:
        ctx.gating = gating
        ctx.save_for_backward(gate, up)
        g, s, u = bound_gate(gating, gate, up)
        return g * s * u

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        gate, up = ctx.saved_tensors
        return None, *bound_gradients(ctx.gating, gate, up, dy)


class FeedForward(nn.Module):
    """x (..., D) -> W_down gated(W_gate x, W_up x), (..., D)."""

    def __init__(self, node: FeedForwardNode) -> None:
        super().__init__()
        self.w_gate, self.w_up = construct(node.w_gate), construct(node.w_up)
        self.w_down, self.gating = construct(node.w_down), node.gating

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(apply_gate(self.gating, self.w_gate(x), self.w_up(x)))
