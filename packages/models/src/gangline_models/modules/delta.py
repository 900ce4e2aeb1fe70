"""Gated delta rule in chunks (Yang et al., Gated DeltaNet, arXiv 2412.06464, sections 3.1 to 3.3).

A head keeps a state matrix S, a memory from keys to values with a row per key feature. At each token the head decays S
by α, reads the value that S stores for the key, and writes the difference from the new value, scaled by β (the delta
rule; Schlag et al., arXiv 2102.11174):

    S_t = α_t S_{t-1} + k_t β_t (v_t - α_t S_{t-1}ᵀ k_t)ᵀ         o_t = S_tᵀ q_t

with α = exp(-exp(a_log) · softplus(a + dt_bias)), β = sigmoid(b), and k, q of L2 norm 1 (q then divided by the square
root of its width).

This recurrence is slow token by token. In a chunk of L tokens, with g_i = Σ_{j ≤ i} log α_j, token i writes u_i:

    u_i = β_i (v_i - exp(g_i) Sᵀ k_i - Σ_{j < i} exp(g_i - g_j) (k_i·k_j) u_j)

This is a triangular system (I + A) U = β V - (β exp(g) K) S, which is solved for both right-hand sides before S is
known. Then

    O = (exp(g) Q) S + tril(exp(g_i - g_j) Q Kᵀ) U        S' = exp(g_L) S + (exp(g_L - g) K)ᵀ U

The state does not cross documents: pairs of tokens from different documents are masked, and each token reads and writes
only the state of its own document.

The generation cache stores S of each head, but no keys.

B batch, T tokens, D model width, C width of a head, F features.
K key heads and H value heads, H / K value heads per key head; a row is split into chunks of `chunk` tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gangline.batch import Batch
from gangline.comm.base import Comm
from gangline.model.build import construct
from gangline.model.cache import Cache, Carried
from gangline_models.delta_nodes import DecayNode, GatedDeltaNode


class Decay(nn.Module):
    """Log decay of the state: a (B, T, H) -> log α, in float32 or wider."""

    def __init__(self, node: DecayNode) -> None:
        super().__init__()
        self.a_log, self.dt_bias = nn.Parameter(torch.empty(node.heads)), nn.Parameter(torch.empty(node.heads))

    def bind(self, axis: Comm) -> None:
        """Ignore the ranks: the parameters are sharded by head, so no communication is needed."""

    def forward(self, a_BTH: Tensor) -> Tensor:
        wide = torch.promote_types(a_BTH.dtype, torch.float32)
        return -self.a_log.to(wide).exp() * F.softplus(a_BTH.to(wide) + self.dt_bias.to(wide))


class GatedDelta(nn.Module):
    """Gated delta-rule layer: x (B, t, D) -> (B, t, D)."""

    def __init__(self, node: GatedDeltaNode) -> None:
        super().__init__()
        self.wqkvz, self.wba, self.w_out = construct(node.wqkvz), construct(node.wba), construct(node.w_out)
        self.conv_q, self.conv_k, self.conv_v = (construct(c) for c in (node.conv_q, node.conv_k, node.conv_v))
        self.decay, self.norm = construct(node.decay), construct(node.norm)
        self.each, self.key_dim, self.value_dim = node.heads // node.key_heads, node.key_dim, node.value_dim
        self.chunk = node.chunk

    def forward(self, x_BtD: Tensor, batch: Batch) -> Tensor:
        """Apply the layer; the backward pass recomputes everything between the matmuls, to save memory."""
        arguments = self.wqkvz(x_BtD), self.wba(x_BtD), batch.document
        if batch.cache is not None:
            return self.w_out(self._mix_tokens(*arguments, batch.cache))
        return self.w_out(checkpoint(self._mix_tokens, *arguments, use_reentrant=False, preserve_rng_state=False))

    def _mix_tokens(
        self, qkvz_BTF: Tensor, ba_BTF: Tensor, document_BT: Tensor | None, cache: Cache | None = None
    ) -> Tensor:
        values = self.each * self.value_dim
        of_key_head = 2 * self.key_dim + 2 * values  # rows of wqkvz per key head: q, k, v, z
        q, k, v, z = (
            y.flatten(-2)
            for y in qkvz_BTF.unflatten(-1, (-1, of_key_head)).split(
                (self.key_dim, self.key_dim, values, values), dim=-1
            )
        )
        b_BTH, a_BTH = (y.flatten(-2) for y in ba_BTF.unflatten(-1, (-1, 2 * self.each)).split(self.each, dim=-1))
        q, k, v = (conv(y, document_BT, cache) for conv, y in ((self.conv_q, q), (self.conv_k, k), (self.conv_v, v)))
        q_BTKC, k_BTKC = (y.unflatten(-1, (-1, self.key_dim)) for y in (q, k))
        v_BTHC, z_BTHC = (y.unflatten(-1, (-1, self.value_dim)) for y in (v, z))
        arguments = q_BTKC, k_BTKC, v_BTHC, self.decay(a_BTH), b_BTH.sigmoid()
        carried = None if cache is None else cache.get(self, Carried)
        if carried is not None and carried.tensor is not None:
            out_BTHC, carried.tensor = step_delta_rule(*arguments, carried.tensor)
        else:
            out_BTHC, state = apply_delta_rule(*arguments, document_BT, chunk=self.chunk)
            if carried is not None:
                carried.tensor = state
        wide = torch.promote_types(z_BTHC.dtype, torch.float32)
        return (self.norm(out_BTHC) * F.silu(z_BTHC.to(wide))).to(qkvz_BTF.dtype).flatten(-2)


def apply_delta_rule(
    q_BTKC: Tensor,
    k_BTKC: Tensor,
    v_BTHC: Tensor,
    log_decay_BTH: Tensor,
    beta_BTH: Tensor,
    document_BT: Tensor | None,
    *,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, C), and S after the last token (B, H, key width, value width), in float32 or wider.

    Documents are contiguous runs of tokens.
    """
    B, T, H, V = v_BTHC.shape
    wide = torch.promote_types(v_BTHC.dtype, torch.float32)
    each, L = H // q_BTKC.shape[2], min(chunk, T)
    q, k = (normalise_length(x.to(wide)).repeat_interleave(each, dim=2) for x in (q_BTKC, k_BTKC))
    q, k, v = (split_chunks(x, L) for x in (q * q.shape[-1] ** -0.5, k, v_BTHC.to(wide)))  # (B, H, chunks, L, C)
    g, beta = (split_chunks(x.to(wide)[..., None], L) for x in (log_decay_BTH, beta_BTH))  # (B, H, chunks, L, 1)
    g = accumulate(g)
    document = torch.zeros(B, T, dtype=torch.int64, device=v.device) if document_BT is None else document_BT
    # The last chunk is padded at its end, with the last token's document; padding does not change the state.
    padded_document = torch.cat((document, document[:, -1:].expand(-1, -T % L)), dim=1)
    d = padded_document.unflatten(1, (-1, L))[:, None, :, :, None]  # (B, 1, chunks, L, 1)
    before = F.pad(d[:, :, :-1, -1:], (0, 0, 0, 0, 1, 0), value=-2)  # document of the token before each chunk
    takes, hands_on, lasts = (d == before).to(wide), (d == d[..., -1:, :]).to(wide), (d[..., -1:, :] == before).to(wide)
    mask = (d == d.mT) & torch.ones(L, L, dtype=torch.bool, device=v.device).tril()
    decay = (g - g.mT).masked_fill(~mask, -torch.inf).exp()
    system = ((k * beta) @ k.mT * decay).tril(-1)
    writes, reads = torch.linalg.solve_triangular(
        system, torch.cat((v * beta, k * beta * g.exp() * takes), dim=-1), upper=False, unitriangular=True
    ).split((V, k.shape[-1]), dim=-1)
    scores, q = q @ k.mT * decay, q * g.exp() * takes
    last = g[..., -1:, :]
    k, keeps = k * (last - g).exp() * hands_on, last.exp() * lasts
    state, out = v.new_zeros(B, H, k.shape[-1], V), []
    for n in range(v.shape[2]):
        update = writes[:, :, n] - reads[:, :, n] @ state
        out.append(q[:, :, n] @ state + scores[:, :, n] @ update)
        state = state * keeps[:, :, n] + k[:, :, n].mT @ update
    return torch.stack(out, dim=2).flatten(2, 3)[:, :, :T].transpose(1, 2).to(v_BTHC.dtype), state


def step_delta_rule(
    q_B1KC: Tensor, k_B1KC: Tensor, v_B1HC: Tensor, log_decay_B1H: Tensor, beta_B1H: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the recurrence to one token: return o (B, 1, H, C) and the new state. state: S of all tokens before.

    Raises ValueError for several tokens at a time, which `apply_delta_rule` handles.
    """
    if v_B1HC.shape[1] != 1:
        raise ValueError(f"expected one token per step of the generation, got {v_B1HC.shape[1]}")
    wide, each = state.dtype, v_B1HC.shape[2] // q_B1KC.shape[2]
    q, k = (normalise_length(x.to(wide)).repeat_interleave(each, dim=2).squeeze(1)[..., None] for x in (q_B1KC, k_B1KC))
    v = v_B1HC.to(wide).squeeze(1)[..., None]
    decay, beta = (x.to(wide).squeeze(1)[..., None, None] for x in (log_decay_B1H.exp(), beta_B1H))
    state = state * decay
    update = beta * (v - (state * k).sum(-2)[..., None])  # (B, H, C, 1)
    state = state + k @ update.mT
    return (state.mT @ (q * q.shape[-2] ** -0.5)).squeeze(-1).unsqueeze(1).to(v_B1HC.dtype), state


def normalise_length(x: Tensor) -> Tensor:
    """Divide x (..., C) by its L2 norm over the last dim."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def accumulate(x_L1: Tensor) -> Tensor:
    """Return the sums of x (.., L, 1) up to each token of a chunk."""
    if not torch.are_deterministic_algorithms_enabled():
        return x_L1.cumsum(-2)
    # In this mode torch refuses cumsum of floats on a GPU: sum the rows of a lower triangle.
    return x_L1.mT.expand(*x_L1.shape[:-2], x_L1.shape[-2], -1).tril().sum(-1, keepdim=True)


def split_chunks(x_BTHF: Tensor, length: int) -> Tensor:
    """Split x into chunks, (B, H, chunks, L, F), padded with zeros."""
    x_BHTF = x_BTHF.transpose(1, 2)
    return F.pad(x_BHTF, (0, 0, 0, -x_BHTF.shape[2] % length)).unflatten(2, (-1, length))
