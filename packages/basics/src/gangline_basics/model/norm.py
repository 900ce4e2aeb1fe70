"""RMSNorm (Zhang and Sennrich, 2019, arXiv 1910.07467, eq. 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline_basics.model.decoder_nodes import NormNode


class RMSNorm(nn.Module):
    """x (..., D) -> x / sqrt(mean(x²) + eps) · (w + offset), computed in float32 for any dtype of x."""

    def __init__(self, node: NormNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.dim))
        self.eps, self.offset = node.eps, node.offset

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.scale_of(x), self.eps)

    def scale_of(self, x: Tensor) -> Tensor:
        """Return the weight that multiplies the normalised features, (D,), in the dtype of `x`."""
        weight = self.weight + self.offset if self.offset else self.weight
        return weight.to(x.dtype)
