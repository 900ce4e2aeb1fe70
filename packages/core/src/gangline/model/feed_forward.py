"""The gated feed-forward layer, SwiGLU (Shazeer, arXiv 2002.05202, section 2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gangline.model.build import construct
from gangline.model.tree import FeedForwardNode


class FeedForward(nn.Module):
    """x (..., D) -> W_down (silu(W_gate x) · W_up x), (..., D)."""

    def __init__(self, node: FeedForwardNode) -> None:
        super().__init__()
        self.w_gate, self.w_up = construct(node.w_gate), construct(node.w_up)
        self.w_down = construct(node.w_down)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.silu(self.w_gate(x)) * self.w_up(x))
