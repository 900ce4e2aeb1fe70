"""One layer of the decoder."""

from __future__ import annotations

from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline_basics.model.decoder_nodes import BlockNode


class Block(nn.Module):
    """hidden (B, T, D) -> (B, T, D): each half reads a normalised copy and adds to the residual stream."""

    def __init__(self, node: BlockNode) -> None:
        super().__init__()
        self.attention_norm = construct(node.attention_norm)
        self.attention = construct(node.attention)
        self.feed_forward_norm = construct(node.feed_forward_norm)
        self.feed_forward = construct(node.feed_forward)

    def forward(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        hidden_BTD = hidden_BTD + self.attention(self.attention_norm(hidden_BTD), batch)
        return hidden_BTD + self.feed_forward(self.feed_forward_norm(hidden_BTD))
