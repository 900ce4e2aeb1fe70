"""The two layers that a strategy cuts by itself: `Linear` and `Embedding`.

Neither draws its weights (the plan's `Init` says how, by name) and neither reads its sizes again after construction:
a rank may hold a part of the rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.linear_nodes import EmbeddingNode, LinearNode


class Linear(nn.Module):
    """x (..., in) -> x Wᵀ + b (..., out), with W (out, in).

    `product` multiplies: a strategy puts the precision's `linear` there, or its own around it.
    """

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(self, node: LinearNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.out_features, node.in_features))
        self.bias = nn.Parameter(torch.empty(node.out_features)) if node.bias else None
        self.product = F.linear

    @property
    def matrix(self) -> Tensor:
        """What is multiplied with: W, or where a wrapper keeps it in another way what stands for it."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.matrix, self.bias)


class Embedding(nn.Module):
    """tokens (B, T) of the batch -> scale · their rows of W (V, D): (B, T, D).

    `lookup` finds them: a strategy that holds some of the rows puts its own there.
    """

    lookup: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, node: EmbeddingNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.vocab_size, node.dim))
        self.lookup, self.scale = F.embedding, node.scale

    def forward(self, batch: Batch) -> Tensor:
        rows_BTD = self.lookup(batch.tokens, self.weight)
        return rows_BTD if self.scale == 1.0 else rows_BTD * self.scale
