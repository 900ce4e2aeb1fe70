"""LayerNorm (Ba et al., arXiv 1607.06450, section 3)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline_models.nodes import LayerNormNode


class LayerNorm(nn.Module):
    """LayerNorm: x (..., D) -> (x - mean) / sqrt(variance + eps) · w + b, computed in float32 for lower-precision x.

    Without `node.bias`, b is 0.
    """

    def __init__(self, node: LayerNormNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.dim))
        self.bias = nn.Parameter(torch.empty(node.dim)) if node.bias else None
        self.eps = node.eps

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, self.weight.shape, self.weight.to(x.dtype), bias, self.eps)
