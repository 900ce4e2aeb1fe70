"""Ungated feed-forward of the original Transformer, with GELU in place of ReLU.

Vaswani et al. (arXiv 1706.03762, section 3.3); GELU in its tanh approximation (Hendrycks and Gimpel, arXiv 1606.08415,
section 2), with which GPT-2 was trained.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from gangline.model.build import construct
from gangline_models.nodes import UngatedFeedForwardNode


class UngatedFeedForward(nn.Module):
    """Ungated feed-forward: x (..., D) -> W_down gelu(W_up x + b) + b', (..., D)."""

    def __init__(self, node: UngatedFeedForwardNode) -> None:
        super().__init__()
        self.w_up, self.w_down = construct(node.w_up), construct(node.w_down)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.gelu(self.w_up(x), approximate="tanh"))
