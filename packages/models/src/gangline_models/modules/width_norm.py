"""RMSNorm of queries or keys over all heads together (OLMo 2, arXiv 2501.00656, section 2.1).

With N the width of all heads and r = 1 / sqrt(Σ x² / N + eps):

    y = x r w        dw = Σ dy x r        dx = r dy w - x r³ Σ (dy w x) / N

Σ x² and Σ (dy w x) run over all features of a token: each is all-reduced over the ranks of the other heads, one
number per token.

B batch, T tokens, H heads of this rank, C width of a head
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline_models.nodes import WidthNormNode


class WidthNorm(nn.Module):
    """RMSNorm over H and C: x (B, T, H, C) -> (B, T, H, C); sums in float32 or wider."""

    def __init__(self, node: WidthNormNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.dim))
        self.width, self.eps = node.dim, node.eps
        self.comm: Comm | None = None

    def bind(self, axis: Comm) -> None:
        """Set the communicator of the ranks over which the heads are sharded."""
        self.comm = axis

    def forward(self, x_BTHC: Tensor) -> Tensor:
        weight = self.weight.to(x_BTHC.dtype)
        return _Normalise.apply(x_BTHC.flatten(-2), weight, self.width, self.eps, self.comm).view_as(x_BTHC)


class _Normalise(torch.autograd.Function):
    """Normalise this rank's features (B, T, F) with weight (F,) -> (B, T, F). Saves the features, the weight and r."""

    @staticmethod
    def forward(ctx, x_BTF: Tensor, weight_F: Tensor, width: int, eps: float, comm: Comm | None) -> Tensor:
        wide = x_BTF.to(torch.promote_types(x_BTF.dtype, torch.float32))
        r_BT1 = (_reduce(comm, wide.square().sum(-1, keepdim=True)) / width + eps).rsqrt()
        ctx.save_for_backward(x_BTF, weight_F, r_BT1)
        ctx.width, ctx.comm = width, comm
        return (wide * r_BT1).to(x_BTF.dtype) * weight_F

    @staticmethod
    def backward(ctx, grad_BTF: Tensor):
        x_BTF, weight_F, r_BT1 = ctx.saved_tensors
        wide, grad = x_BTF.to(r_BT1.dtype), grad_BTF.to(r_BT1.dtype)
        dweight_F = (grad * wide * r_BT1).flatten(0, -2).sum(0).to(weight_F.dtype)
        grad = grad * weight_F
        share_BT1 = _reduce(ctx.comm, (grad * wide).sum(-1, keepdim=True)) / ctx.width
        return (r_BT1 * grad - wide * r_BT1**3 * share_BT1).to(x_BTF.dtype), dweight_F, None, None, None


def _reduce(comm: Comm | None, x: Tensor) -> Tensor:
    return x if comm is None or comm.size == 1 else comm.all_reduce(x)
