"""Ungated feed-forward of the original Transformer, with GELU in place of ReLU.

Vaswani et al. (arXiv 1706.03762, section 3.3); GELU exact, or in its tanh approximation, with which GPT-2 was trained
(Hendrycks and Gimpel, arXiv 1606.08415, section 2).
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
        self.approximate = "tanh" if node.gelu == "tanh" else "none"
        self.w_up, self.w_down = construct(node.w_up), construct(node.w_down)

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(F.gelu(self.w_up(x), approximate=self.approximate))
