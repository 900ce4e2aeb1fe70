"""Attention of some queries over some keys (a block), with the log-sum-exp of each row, so that blocks can be merged.

    S = scale · q kᵀ      lse = log Σ exp(S)      out = exp(S - lse) v

The backward pass of a block takes `out` and `lse` of the *full* row: then P = exp(S - lse) is the block's part of the
row's softmax, and the gradients of a row are the sums over its blocks (Dao et al., FlashAttention, arXiv 2205.14135,
section 3.1).

B batch, H query heads, K key and value heads, T queries, S keys, C width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_cuda_forward = torch.ops.aten._scaled_dot_product_flash_attention
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward

Forward = Callable[[Tensor, Tensor, Tensor, bool, Tensor | None, float | None], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


class Kernel(NamedTuple):
    """The forward and backward functions of an attention block.

    forward(q, k, v, causal, visible, scale) -> out (B, H, T, C), lse (B, H, T) in float32 at least. If all keys are
    hidden from a query, the lse of the query is -inf and its out is any finite value.
    backward(dout, q, k, v, out, lse, causal, visible, scale) -> dq, dk, dv

    q        (B, H, T, C)
    k, v     (B, K, S, C)
    causal   whether T = S and query i sees only keys 0 to i; not together with `visible`
    visible  mask (B, 1, T, S), bool: whether a query sees a key; None: all keys are visible
    scale    factor of the scores; None: 1 / sqrt(C)
    """

    forward: Forward
    backward: Backward


def choose_kernel(q: Tensor, masked: bool) -> Kernel:
    """Return the fastest kernel for queries with the device, dtype and width of `q`, with or without a mask."""
    if q.device.type == "cpu":
        return CPU
    flash = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return CUDA if q.device.type == "cuda" and flash and not masked else MATH


def _make_additive_mask(q: Tensor, visible: Tensor | None) -> Tensor | None:
    """Return the additive mask of the CPU kernel: 0 for visible keys, -inf for hidden keys; None without a mask."""
    return None if visible is None else q.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)


def _make_rows_dense(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors with stride 1 in the last dim: flash kernels need it, and the CPU kernel does not check it.

    torch.cat may return channels_last memory, for example with rotary embeddings of heads of width 2.
    """
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _forward_cpu(q, k, v, causal, visible, scale):
    q, k, v = _make_rows_dense(q, k, v)
    out, lse = _cpu_forward(q, k, v, 0.0, causal, attn_mask=_make_additive_mask(q, visible), scale=scale)
    if visible is not None:  # the kernel returns lse 0 for a query that sees no key
        lse = lse.masked_fill(~visible.any(-1), -torch.inf)
    return out, lse


def _backward_cpu(dout, q, k, v, out, lse, causal, visible, scale):
    dout, q, k, v, out = _make_rows_dense(dout, q, k, v, out)
    return _cpu_backward(dout, q, k, v, out, lse, 0.0, causal, attn_mask=_make_additive_mask(q, visible), scale=scale)


def _forward_cuda(q, k, v, causal, visible, scale):
    q, k, v = _make_rows_dense(q, k, v)
    out, lse, *_ = _cuda_forward(q, k, v, 0.0, causal, False, scale=scale)
    return out, lse


def _backward_cuda(dout, q, k, v, out, lse, causal, visible, scale):
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of the unused dropout
    dout, q, k, v, out = _make_rows_dense(dout, q, k, v, out)
    queries, keys = q.shape[2], k.shape[2]
    whole = None, None, queries, keys, 0.0, causal, unused, unused
    # The kernel reads `lse` as contiguous, whatever its strides; for a block with half of the queries `lse` is a slice.
    return _cuda_backward(dout, q, k, v, out, lse.contiguous(), *whole, scale=scale)


def _compute_scores(q: Tensor, k: Tensor, causal: bool, visible: Tensor | None, scale: float | None) -> Tensor:
    """Return scores (B, K, G, T, S) in float32 at least, with G = H / K query heads per key head; -inf if hidden."""
    grouped = _widen(q).unflatten(1, (k.shape[1], -1))
    scores = grouped @ _widen(k).mT.unsqueeze(2) * _get_scale(q, scale)
    if causal:
        visible = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    elif visible is not None:
        visible = visible.unsqueeze(1)
    return scores if visible is None else scores.masked_fill(~visible, -torch.inf)


def _get_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _forward_math(q, k, v, causal, visible, scale):
    scores = _compute_scores(q, k, causal, visible, scale)
    lse = scores.logsumexp(-1)
    p = (scores - lse.masked_fill(lse.isneginf(), 0).unsqueeze(-1)).exp()
    return (p @ _widen(v).unsqueeze(2)).flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _backward_math(dout, q, k, v, out, lse, causal, visible, scale):
    dout, heads = _widen(dout), (k.shape[1], -1)
    p = (_compute_scores(q, k, causal, visible, scale) - lse.unflatten(1, heads).unsqueeze(-1)).exp()
    each = (dout * _widen(out)).sum(-1, keepdim=True).unflatten(1, heads)
    dout = dout.unflatten(1, heads)
    ds = p * (dout @ _widen(v).mT.unsqueeze(2) - each) * _get_scale(q, scale)
    dq = (ds @ _widen(k).unsqueeze(2)).flatten(1, 2)
    dk = (ds.mT @ _widen(q).unflatten(1, heads)).sum(2)
    dv = (p.mT @ dout).sum(2)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _widen(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


CPU = Kernel(_forward_cpu, _backward_cpu)
CUDA = Kernel(_forward_cuda, _backward_cuda)
MATH = Kernel(_forward_math, _backward_math)  # no GPU kernel takes a mask and returns the log-sum-exp
