"""Head: the final norm, the matmul to vocabulary logits, and the loss.

B batch, T tokens, D model width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline_basics.model.decoder_nodes import HeadNode
from gangline_basics.model.loss import CrossEntropy, cap_logits_, compute_logits


class Head(nn.Module):
    """hidden (B, T, D) -> the loss summed over the batch's valid targets. Sampling calls `compute_logits` instead."""

    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    matmul: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, node: HeadNode) -> None:
        super().__init__()
        self.norm = construct(node.norm)
        self.weight = nn.Parameter(torch.empty(node.vocab_size, node.dim))
        self.loss = CrossEntropy(node.call, node.chunk)
        self.soft_cap, self.scale = node.soft_cap, node.scale
        self.matmul = compute_logits

    def forward(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        return self.loss(self.normalise(hidden_BTD), self.weight, batch.targets, batch.loss_mask)

    def normalise(self, hidden_BTD: Tensor) -> Tensor:
        """Return the input of the matmul to vocabulary logits, (B, T, D)."""
        return self.scale_hidden(self.norm(hidden_BTD))

    def scale_hidden(self, x_BTD: Tensor) -> Tensor:
        """Return the input of the matmul to vocabulary logits, for normalised `x_BTD`."""
        return x_BTD if self.scale == 1.0 else x_BTD * self.scale

    def compute_logits(self, hidden_BTD: Tensor) -> Tensor:
        """Return the logits of the next token, (B, T, V), in float32 at least."""
        x_BTV = self.matmul(self.normalise(hidden_BTD), self.weight)
        x_BTV = x_BTV.to(torch.promote_types(x_BTV.dtype, torch.float32))
        return x_BTV if self.soft_cap is None else cap_logits_(x_BTV, self.soft_cap)
