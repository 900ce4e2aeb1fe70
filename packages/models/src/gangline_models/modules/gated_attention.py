"""Gated attention: attention with a gate on its output (Qiu et al., arXiv 2505.06708, section 2.2; Qwen3-Next).

    o_i = attention(q_i, k, v) · sigmoid(W_g,i x)

elementwise, for each head i, before W_O. The generation cache stores keys and values as for any attention; the gate
depends only on the current token.

B batch, T tokens, D model width, H query heads, C width of a head
"""

from __future__ import annotations

from torch import Tensor

from gangline.batch import Batch
from gangline_basics.model.attention import GroupedAttention


class GatedAttention(GroupedAttention):
    """Gated attention: x (B, T, D) -> (B, T, D). Rows of `wq`: for each head its query, then its gate."""

    def forward(self, x_BTD: Tensor, batch: Batch) -> Tensor:
        q_BTHC, gate_BTHC = self.wq(x_BTD).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        return self.wo((self.attend(q_BTHC, x_BTD, batch) * gate_BTHC.sigmoid()).flatten(-2))
