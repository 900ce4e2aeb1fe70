"""Multi-head latent attention, MLA (DeepSeek-V2, arXiv 2405.04434, section 2.1; DeepSeek-V3, arXiv 2412.19437, 2.1.1).

Keys and values of all heads are projected from one low-rank vector c per token, queries from another, c':

    c  = W_DKV x          k_i = [W_UK,i norm(c) ; r]       v_i = W_UV,i norm(c)
    c' = W_DQ x           q_i = W_UQ,i norm(c')
    r  = RoPE(W_KR x)     and RoPE on the last features of q_i
    o_i = softmax(scale · q_i kᵀ_i) v_i                     y = W_O [o_1 ; o_2 ; ...]

RoPE does not commute with W_UK. Therefore RoPE rotates separate features, and all heads share the key r of these
features. The generation cache stores norm(c) and r of each token: rank + rope_dim numbers, where plain attention stores
2 · H · C. For the prompt, as in training, keys and values are computed in full. Later queries are projected to the
space of c, where all heads share one key; the output of a head is projected from its weighted mean of norm(c):

    q_i·k_i = (W_UK,iᵀ q_nope,i)·norm(c) + q_rope,i·r         o_i = W_UV,i Σ_t p_t norm(c_t)

In Hugging Face files W_DKV and W_KR are one matrix (`wkv_a`), W_UK and W_UV another (`kv.up`), head by head.

B batch, T tokens, t tokens of the hidden state, D model width, H query heads, C width of a head, F features
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline.model.forward_context import gather_heads
from gangline.model.linear import Linear
from gangline_basics.model.attention import get_plain_attention
from gangline_basics.model.attention_backend import use_backend
from gangline_basics.model.kept_tokens import KeptTokens, KeyValues, attend_one_query
from gangline_basics.model.rope import rotate_pair
from gangline_basics.model.rope_rates import compute_frequencies
from gangline_models.latent_nodes import LatentUpNode, MlaNode


class LatentUp(nn.Module):
    """Latent projection: x (B, t, D) -> up(norm(down(x))), (B, T, H · C); without `down`, x (B, t, F) is latent."""

    def __init__(self, node: LatentUpNode) -> None:
        super().__init__()
        self.down = construct(node.down) if node.down else None
        self.norm, self.up = construct(node.norm), construct(node.up)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.norm(x if self.down is None else self.down(x)))


class LatentAttention(nn.Module):
    """Multi-head latent attention: x (B, t, D) -> (B, t, D)."""

    attention: Callable[..., Tensor]

    def __init__(self, node: MlaNode) -> None:
        super().__init__()
        self.wq = construct(node.wq) if node.wq else None
        self.q = construct(node.q) if node.q else None
        self.wkv_a, self.kv, self.wo = construct(node.wkv_a), construct(node.kv), construct(node.wo)
        self.latent, self.nope, self.rotary, self.value = node.kv.rank, node.nope_dim, node.rope_dim, node.v_dim
        self.interleaved = node.interleaved
        self.rates = compute_frequencies(node.rope, node.rope_dim)
        self.magnitude = node.rope.scaling.magnitude if node.rope.scaling else 1.0
        self.call = node.call
        self.attention = get_plain_attention(node.call)
        use_backend(node.backend)

    def forward(self, x_BtD: Tensor, batch: Batch) -> Tensor:
        q_BTF = self.wq(x_BtD) if self.wq is not None else self.q(x_BtD)  # type: ignore[misc]
        c_BtF, r_BtF = self.wkv_a(x_BtD).split((self.latent, self.rotary), dim=-1)
        q_BHTC = q_BTF.unflatten(-1, (-1, self.nope + self.rotary)).transpose(1, 2)
        q_nope, q_rotary = q_BHTC.split((self.nope, self.rotary), dim=-1)
        r_B1TF = gather_heads(r_BtF).unsqueeze(1)
        if self.interleaved:
            q_rotary, r_B1TF = split_pairs(q_rotary), split_pairs(r_B1TF)
        q_rotary, r_B1TF = rotate_pair(q_rotary, r_B1TF, batch.position, self.rates, self.magnitude)
        if batch.cache is None:
            out_BHTC = self._attend_heads(self._attend_padded, q_nope, q_rotary, c_BtF, r_B1TF, batch)
        elif type(self.kv.up) is not Linear or self.kv.up.bias is not None:  # such as an adapter
            keys = batch.cache.get(self, partial(KeyValues, self._attend_padded, self.call))
            out_BHTC = self._attend_heads(keys.attend, q_nope, q_rotary, c_BtF, r_B1TF, batch)
        else:
            token_cache = batch.cache.get(self, KeptTokens)
            of_token = torch.cat((self.kv.norm(c_BtF).unsqueeze(1), r_B1TF), dim=-1)
            if token_cache.empty:
                token_cache.begin((of_token,), batch.document)
                out_BHTC = self._attend_heads(self._attend_padded, q_nope, q_rotary, c_BtF, r_B1TF, batch)
            else:
                (keys_B1SF,), text = token_cache.add((of_token,))
                out_BHTC = self._attend_latent(q_nope, q_rotary, keys_B1SF, text)
        return self.wo(out_BHTC.transpose(1, 2).flatten(-2))

    def _attend_heads(
        self,
        attention: Callable[..., Tensor],
        q_nope: Tensor,
        q_rotary: Tensor,
        c_BtF: Tensor,
        r_B1TF: Tensor,
        batch: Batch,
    ) -> Tensor:
        """Attend with full keys and values of all heads; return (B, H, T, C)."""
        kv_BHTC = self.kv(c_BtF).unflatten(-1, (-1, self.nope + self.value)).transpose(1, 2)
        k_nope, v_BHTC = kv_BHTC.split((self.nope, self.value), dim=-1)
        q = torch.cat((q_nope, q_rotary), dim=-1)
        k = torch.cat((k_nope, r_B1TF.expand(-1, k_nope.shape[1], -1, -1)), dim=-1)
        return attention(q, k, v_BHTC, batch.document, batch.position)

    def _attend_latent(self, q_nope: Tensor, q_rotary: Tensor, keys_B1SF: Tensor, text_B11S: Tensor | None) -> Tensor:
        """Attend with one query per row to the cached [norm(c) ; r]; return (B, H, 1, C)."""
        weight_HCF = self.kv.up.weight.to(q_nope.dtype).unflatten(0, (-1, self.nope + self.value))
        up_k, up_v = weight_HCF.split((self.nope, self.value), dim=1)
        q_BHF = torch.einsum("bhc,hcf->bhf", q_nope.squeeze(2), up_k)
        q_BH1F = torch.cat((q_BHF.unsqueeze(2), q_rotary), dim=-1)
        c_BH1F = attend_one_query(q_BH1F, keys_B1SF, keys_B1SF[..., : self.latent], text_B11S, self.call, None)
        return torch.einsum("bhf,hcf->bhc", c_BH1F.squeeze(2), up_v).unsqueeze(2)

    def _attend_padded(
        self, q: Tensor, k: Tensor, v: Tensor, document_BT: Tensor | None, position_BT: Tensor
    ) -> Tensor:
        """Attend with queries, keys and values zero-padded to one width, as kernels require; results do not change."""
        width = max(q.shape[-1], v.shape[-1])
        if q.shape[-1] == v.shape[-1]:
            return self.attention(q, k, v, document_BT, position_BT)
        q, k, v = (F.pad(x, (0, width - x.shape[-1])) if width > x.shape[-1] else x for x in (q, k, v))
        return self.attention(q, k, v, document_BT, position_BT)[..., : self.value]


def split_pairs(x: Tensor) -> Tensor:
    """Convert the last dim of x (..., R) from interleaved RoPE pairs to halves: first, then second features."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
