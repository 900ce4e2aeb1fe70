"""Multi-head latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, 2.1.1).

Keys and values of all heads are made of one short vector c of each token, and so are the queries of another, c':

    c  = W_DKV x          k_i = [W_UK,i norm(c) ; r]       v_i = W_UV,i norm(c)
    c' = W_DQ x           q_i = W_UQ,i norm(c')
    r  = RoPE(W_KR x)     and RoPE on the last features of q_i
    o_i = softmax(scale · q_i kᵀ_i) v_i                     y = W_O [o_1 ; o_2 ; ...]

Rotary positions do not commute with W_UK, so they have features of their own, whose key r is one for all heads. A cache
keeps c and r of each token, rank + rope_dim numbers, where plain attention keeps 2 · H · C. In training nothing is
cached, and keys and values are made whole.

In files W_DKV and W_KR are one matrix (`wkv_a`), and W_UK and W_UV another (`kv.up`), head by head.

B batch, T tokens, t tokens of the hidden state, D model width, H query heads, C width of a head, F features
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.forward_context import for_all_heads
from gangline.model import construct, frequencies, plain, rotated
from gangline.strategy import Batch
from gangline_models.latent_nodes import LatentUpNode, MlaNode


class LatentUp(nn.Module):
    """x (B, t, D), or the latent vector itself (B, t, F) -> up(norm(down(x))), (B, T, H · C)."""

    def __init__(self, node: LatentUpNode) -> None:
        super().__init__()
        self.down = construct(node.down) if node.down else None
        self.norm, self.up = construct(node.norm), construct(node.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x if self.down is None else self.down(x)))


class LatentAttention(nn.Module):
    """x (B, t, D) -> (B, t, D)."""

    attention: Callable[..., Tensor]

    def __init__(self, node: MlaNode) -> None:
        super().__init__()
        self.wq = construct(node.wq) if node.wq else None
        self.q = construct(node.q) if node.q else None
        self.wkv_a, self.kv, self.wo = construct(node.wkv_a), construct(node.kv), construct(node.wo)
        self.latent, self.nope, self.rotary, self.value = node.kv.rank, node.nope_dim, node.rope_dim, node.v_dim
        self.interleaved = node.interleaved
        self.rates = frequencies(node.rope, node.rope_dim)
        self.magnitude = node.rope.scaling.magnitude if node.rope.scaling else 1.0
        self.attention = plain(node.call)

    def forward(self, x_BtD: Tensor, batch: Batch) -> Tensor:
        q_BTF = self.wq(x_BtD) if self.wq is not None else self.q(x_BtD)  # type: ignore[misc]
        c_BtF, r_BtF = self.wkv_a(x_BtD).split((self.latent, self.rotary), dim=-1)
        q_BHTC = q_BTF.unflatten(-1, (-1, self.nope + self.rotary)).transpose(1, 2)
        kv_BHTC = self.kv(c_BtF).unflatten(-1, (-1, self.nope + self.value)).transpose(1, 2)
        q_nope, q_rotary = q_BHTC.split((self.nope, self.rotary), dim=-1)
        k_nope, v_BHTC = kv_BHTC.split((self.nope, self.value), dim=-1)
        r_B1TF = for_all_heads(r_BtF).unsqueeze(1)
        if self.interleaved:
            q_rotary, r_B1TF = halved(q_rotary), halved(r_B1TF)
        q_rotary, r_B1TF = rotated(q_rotary, r_B1TF, batch.position, self.rates, self.magnitude)
        q = torch.cat((q_nope, q_rotary), dim=-1)
        k = torch.cat((k_nope, r_B1TF.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        out_BHTC = self._attended(q, k, v_BHTC, batch)
        return self.wo(out_BHTC.transpose(1, 2).flatten(-2))

    def _attended(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        """Kernels want all of one width: zeros behind change neither scores nor values."""
        width = max(q.shape[-1], v.shape[-1])
        if q.shape[-1] == v.shape[-1]:
            return self.attention(q, k, v, batch.document, batch.position)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) if width > x.shape[-1] else x for x in (q, k, v))
        return self.attention(q, k, v, batch.document, batch.position)[..., : self.value]


def halved(x: Tensor) -> Tensor:
    """(..., R) whose pairs are neighbours -> the first ones of all pairs, then the second ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
