"""Transformer block: one layer of a decoder, with the norms of its model family.

before     x + f(norm(x))               GPT-2, Llama ("pre-norm"; Xiong et al., arXiv 2002.04745)
after      x + norm(f(x))               OLMo 2 (arXiv 2501.00656, section 2.1; after Swin v2, arXiv 2111.09883)
both       x + norm'(f(norm(x)))        Gemma 2 (arXiv 2408.00118, section 2)

Each branch is multiplied by `residual_scale` before it is added to the residual stream (Granite; after muP, arXiv
2203.03466).

B batch, T tokens, D model width
"""

from __future__ import annotations

from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline_basics.model.decoder_nodes import BlockNode


class Block(nn.Module):
    """hidden (B, T, D) -> (B, T, D): attention, then feed-forward, each added to the residual stream."""

    def __init__(self, node: BlockNode) -> None:
        super().__init__()
        self.attention_norm = construct(node.attention_norm) if node.attention_norm else None
        self.attention = construct(node.attention)
        self.attention_out_norm = construct(node.attention_out_norm) if node.attention_out_norm else None
        self.feed_forward_norm = construct(node.feed_forward_norm) if node.feed_forward_norm else None
        self.feed_forward = construct(node.feed_forward)
        self.feed_forward_out_norm = construct(node.feed_forward_out_norm) if node.feed_forward_out_norm else None
        self.residual_scale = node.residual_scale

    def forward(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        x_BTD = self.attention(_normalize(self.attention_norm, hidden_BTD), batch)
        hidden_BTD = self._add(hidden_BTD, _normalize(self.attention_out_norm, x_BTD))
        x_BTD = self.feed_forward(_normalize(self.feed_forward_norm, hidden_BTD))
        return self._add(hidden_BTD, _normalize(self.feed_forward_out_norm, x_BTD))

    def _add(self, hidden_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        return hidden_BTD + (x_BTD if self.residual_scale == 1.0 else x_BTD * self.residual_scale)


def _normalize(norm: nn.Module | None, x_BTD: Tensor) -> Tensor:
    return x_BTD if norm is None else norm(x_BTD)
