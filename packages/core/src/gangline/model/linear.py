"""`Linear` and `Embedding`: the two layers that a strategy shards by itself.

Neither layer initializes its weights (the plan's `Init` does, by name) or reads its sizes after construction, because
a rank may hold only some of the rows or columns.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.linear_nodes import EmbeddingNode, LinearNode


class Linear(nn.Module):
    """Linear layer: x (..., in) -> x Wᵀ + b (..., out), with W (out, in).

    `matmul` computes x Wᵀ + b: a strategy sets it to the precision's `linear`, or to a function that calls `linear`.
    """

    matmul: Callable[[Tensor, Tensor, Tensor | None], Tensor]

    def __init__(self, node: LinearNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.out_features, node.in_features))
        self.bias = nn.Parameter(torch.empty(node.out_features)) if node.bias else None
        self.matmul = F.linear

    @property
    def matrix(self) -> Tensor:
        """Matrix of the matmul: W, or a substitute from a wrapper that stores W in another form."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.matmul(x, self.matrix, self.bias)


class Embedding(nn.Module):
    """Embedding layer: tokens (B, T) of the batch -> scale · their rows of W (V, D): (B, T, D).

    `lookup` reads the rows: a strategy that shards the rows replaces it.
    """

    lookup: Callable[[Tensor, Tensor], Tensor]

    def __init__(self, node: EmbeddingNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.vocab_size, node.dim))
        self.lookup, self.scale = F.embedding, node.scale

    def forward(self, batch: Batch) -> Tensor:
        rows_BTD = self.lookup(batch.tokens, self.weight)
        return rows_BTD if self.scale == 1.0 else rows_BTD * self.scale
