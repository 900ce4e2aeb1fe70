"""Learned position embeddings (Radford et al., GPT-2, 2019; Gehring et al., arXiv 1705.03122, section 3.1).

B batch, T tokens, D model width
"""

from __future__ import annotations

from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline_models.nodes import PositionedEmbeddingNode


class PositionedEmbedding(nn.Module):
    """Token plus position embedding: batch -> the sum of both embeddings of each token, (B, T, D)."""

    def __init__(self, node: PositionedEmbeddingNode) -> None:
        super().__init__()
        self.tokens, self.positions = construct(node.tokens), construct(node.positions)

    def forward(self, batch: Batch) -> Tensor:
        return self.tokens(batch) + self.positions.lookup(batch.position, self.positions.weight)
