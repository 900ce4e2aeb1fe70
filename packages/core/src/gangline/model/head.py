"""The head: the last norm, the product with the vocabulary, and the loss.

B batch, T tokens, D model width, V vocabulary
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline.model.loss import CrossEntropy, logits
from gangline.model.tree import HeadNode


class Head(nn.Module):
    """hidden (B, T, D) -> the loss summed over the batch's valid targets; `logits` for sampling."""

    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

    def __init__(self, node: HeadNode) -> None:
        super().__init__()
        self.norm = construct(node.norm)
        self.weight = nn.Parameter(torch.empty(node.vocab_size, node.dim))
        self.loss = CrossEntropy(node.call)

    def forward(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        return self.loss(self.norm(hidden_BTD), self.weight, batch.targets, batch.loss_mask)

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """(B, T, V) of the next token, in float32 at least."""
        x_BTV = logits(self.norm(hidden_BTD), self.weight)
        return x_BTV.to(torch.promote_types(x_BTV.dtype, torch.float32))
