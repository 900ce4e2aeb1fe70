"""Attention with a gate on its output (Qiu et al., arXiv 2505.06708, section 2.2; Qwen3-Next).

    o_i = attention(q_i, k, v) · sigmoid(W_g,i x)

elementwise, for each head i, before W_O. A cache keeps keys and values as of any attention; the gate is of the token
alone.

B batch, T tokens, D model width, H query heads, K key-value heads, C width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline_basics.model.attention import plain
from gangline_basics.model.kept_tokens import KeyValues
from gangline_basics.model.rope import rotate_pair
from gangline_basics.model.rope_rates import frequencies
from gangline_models.delta_nodes import GatedAttentionNode


class GatedAttention(nn.Module):
    """x (B, T, D) -> (B, T, D). Rows of `wq`: of each head its query, then its gate."""

    attention: Callable[..., Tensor]

    def __init__(self, node: GatedAttentionNode) -> None:
        super().__init__()
        self.wq, self.wk, self.wv = construct(node.wq), construct(node.wk), construct(node.wv)
        self.wo = construct(node.wo)
        self.q_norm = construct(node.q_norm) if node.q_norm else nn.Identity()
        self.k_norm = construct(node.k_norm) if node.k_norm else nn.Identity()
        self.head_dim = node.head_dim
        self.rates = frequencies(node.rope, node.head_dim) if node.rope else ()
        self.magnitude = node.rope.scaling.magnitude if node.rope and node.rope.scaling else 1.0
        self.call = node.call
        self.attention = plain(node.call)

    def forward(self, x_BTD: Tensor, batch: Batch) -> Tensor:
        q_BTHC, gate_BTHC = self.wq(x_BTD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        k_BTKC, v_BTKC = (y.unflatten(-1, (-1, self.head_dim)) for y in (self.wk(x_BTD), self.wv(x_BTD)))
        q, k = self.q_norm(q_BTHC).transpose(1, 2), self.k_norm(k_BTKC).transpose(1, 2)
        if self.rates:
            q, k = rotate_pair(q, k, batch.position, self.rates, self.magnitude)
        attention = self.attention
        if batch.cache is not None:
            attention = batch.cache.of(self, partial(KeyValues, self.attention, self.call)).attend
        out_BHTC = attention(q, k, v_BTKC.transpose(1, 2), batch.document, batch.position)
        return self.wo((out_BHTC.transpose(1, 2) * gate_BTHC.sigmoid()).flatten(-2))
