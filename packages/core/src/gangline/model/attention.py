"""Causal self-attention with grouped key and value heads (GQA; Ainslie et al., arXiv 2305.13245).

B batch, T tokens, D model width, H query heads, K key and value heads, E width of a head.
Where a strategy cuts heads or tokens, H, K and T are this rank's: they are read off the tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline.model.recall import Recall
from gangline.model.rope import frequencies, rotated
from gangline.model.tree import AttentionNode

_recall = Recall()  # the mask, which all layers share


def same_document(document_BT: Tensor) -> Tensor:
    """(B, 1, T, T), true where query i may look at key j: j is not after i, and in the same document."""
    same = document_BT[:, None, :, None] == document_BT[:, None, None, :]
    return same.tril()


def attention(
    q_BHTE: Tensor, k_BKTE: Tensor, v_BKTE: Tensor, document_BT: Tensor | None, position_BT: Tensor
) -> Tensor:
    """softmax(q kᵀ / sqrt(E)) v over the past, (B, H, T, E). The default of the `attention` seam.

    Without documents the kernels' own causal path; with them a mask, and key heads repeated, because fused kernels that
    take a mask do not take fewer key heads.
    """
    groups = q_BHTE.shape[1] // k_BKTE.shape[1]
    if document_BT is None:
        return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, is_causal=True, enable_gqa=groups > 1)
    mask = _recall(None, document_BT, lambda: same_document(document_BT))
    if groups > 1:
        k_BKTE, v_BKTE = (x.repeat_interleave(groups, dim=1) for x in (k_BKTE, v_BKTE))
    return F.scaled_dot_product_attention(q_BHTE, k_BKTE, v_BKTE, attn_mask=mask)


class Attention(nn.Module):
    """x (B, T, D) -> (B, T, D). Queries and keys are normalised (if at all) before they are rotated, as in Qwen3."""

    attention: Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor], Tensor]

    def __init__(self, node: AttentionNode) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = construct(node.wq), construct(node.wk), construct(node.wv)
        self.wo = construct(node.wo)
        self.q_norm = construct(node.q_norm) if node.q_norm else None
        self.k_norm = construct(node.k_norm) if node.k_norm else None
        self.head_dim, self.rates = node.head_dim, frequencies(node.rope, node.head_dim)
        self.attention = attention

    def forward(self, x_BTD: Tensor, batch: Batch) -> Tensor:
        q_BTHE, k_BTKE, v_BTKE = (
            y.unflatten(-1, (-1, self.head_dim)) for y in (self.wq(x_BTD), self.wk(x_BTD), self.wv(x_BTD))
        )
        if self.q_norm is not None:
            q_BTHE = self.q_norm(q_BTHE)
        if self.k_norm is not None:
            k_BTKE = self.k_norm(k_BTKE)
        q, k = rotated(q_BTHE.transpose(1, 2), k_BTKE.transpose(1, 2), batch.position, self.rates)
        out_BHTE = self.attention(q, k, v_BTKE.transpose(1, 2), batch.document, batch.position)
        return self.wo(out_BHTE.transpose(1, 2).flatten(-2))
