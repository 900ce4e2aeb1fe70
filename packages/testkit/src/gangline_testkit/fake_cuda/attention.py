"""Attention operators that only a CUDA build of torch has, computed on the host.

Each refuses the data types and strides that the GPU's kernel refuses. The rules by which scaled_dot_product_attention
chooses a kernel are torch's for an H100, without cuDNN.

B batch, H query heads, K key heads, T queries, S keys, C width of a head, N tokens of all rows
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gangline_testkit.fake_cuda.memory import to_device, to_host

MATH, FLASH, EFFICIENT = 0, 1, 2  # torch.nn.attention.SDPBackend
HALF = (torch.float16, torch.bfloat16)


def compute_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Return (output (B, H, T, C) in q's type, log-sum-exp (B, H, T) in float32); bias is added to the scores.

    A query without a visible key gets zeros, and a log-sum-exp of infinity.
    """
    scores = _compute_scores(q, k, bias, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill(lse == -math.inf, math.inf)
    return ((scores - lse[..., None]).exp() @ _expand_heads(v.float(), q.shape[1])).to(q.dtype), lse


def compute_gradients(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, by the given output and log-sum-exp, as kernels compute them.

    These may be those of more keys than k and v hold, as in ring attention.
    """
    probability = (_compute_scores(q, k, bias, scale) - lse[..., None]).exp()
    dprobability = dout.float() @ _expand_heads(v.float(), q.shape[1]).mT
    dscores = probability * (dprobability - (dout.float() * out.float()).sum(-1, keepdim=True)) * scale
    dq = dscores @ _expand_heads(k.float(), q.shape[1])
    return dq.to(q.dtype), _sum_heads(dscores.mT @ q.float(), k), _sum_heads(probability.mT @ dout.float(), v)


def _compute_scores(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    scores = q.float() @ _expand_heads(k.float(), q.shape[1]).mT * scale
    return scores if bias is None else scores + bias


def _expand_heads(x_BKSC: Tensor, heads: int) -> Tensor:
    return x_BKSC.repeat_interleave(heads // x_BKSC.shape[1], 1)


def _sum_heads(dx_BHSC: Tensor, like_BKSC: Tensor) -> Tensor:
    B, K, S, C = like_BKSC.shape
    return dx_BHSC.view(B, K, -1, S, C).sum(2).to(like_BKSC.dtype)


def make_bias(T: int, S: int, causal: bool, left: int = -1, right: int = -1) -> Tensor | None:
    """Return (T, S) with -inf for invisible keys, aligned at the last query and key; None: all are visible.

    left, right: number of visible keys before and after a query's own key; -1: all
    """
    distance = torch.arange(T)[:, None] + (S - T) - torch.arange(S)
    visible = torch.ones(T, S, dtype=torch.bool)
    if causal:
        visible &= distance >= 0
    if left >= 0:
        visible &= distance <= left
    if right >= 0:
        visible &= -distance <= right
    return None if bool(visible.all()) else torch.zeros(T, S).masked_fill_(~visible, -math.inf)


def check_flash(*tensors: Tensor) -> None:
    """Raise RuntimeError for types and strides that FlashAttention's kernels refuse."""
    for x in tensors:
        if x.dtype not in HALF:
            raise RuntimeError(f"FlashAttention only supports fp16 and bf16, not {x.dtype}")
        if x.stride(-1) != 1:
            raise RuntimeError("FlashAttention needs inputs with a contiguous last dimension")
        if x.shape[-1] > 256:
            raise RuntimeError(f"FlashAttention supports heads of width 256 at most, not {x.shape[-1]}")


def choose_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> int:
    """Return the kernel that scaled_dot_product_attention takes."""
    flash, efficient = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.mem_efficient_sdp_enabled()
    alike = q.shape[-1] == v.shape[-1] and q.shape[-1] <= 256
    if flash and attn_mask is None and q.dtype in HALF and alike:
        return FLASH
    return EFFICIENT if efficient and q.shape[1] == k.shape[1] and q.dtype != torch.float64 else MATH


def attend_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Compute FlashAttention of (B, H, T, C); a token's heads are adjacent in the memory of the output."""
    check_flash(q, k, v)
    q, k, v = map(to_host, (q, k, v))
    bias = make_bias(q.shape[2], k.shape[2], is_causal)
    out, lse = compute_attention(q, k, v, bias, _get_scale(q, scale))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    empty = torch.empty(0, dtype=torch.int64)
    T, S = q.shape[2], k.shape[2]
    state = [to_device(x) for x in (torch.zeros(2, dtype=torch.int64), empty.clone(), out.new_empty(0))]
    return to_device(out), to_device(lse), to_device(empty), to_device(empty.clone()), T, S, *state


def attend_flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor,
    cum_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    seed: Tensor,
    offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    """Compute the backward pass of `attend_flash`."""
    check_flash(dout, q, k, v, out)
    _check_dense(lse)
    dout, q, k, v, out, lse = map(to_host, (dout, q, k, v, out, lse))
    bias = make_bias(q.shape[2], k.shape[2], is_causal)
    gradients = compute_gradients(dout, q, k, v, out, lse, bias, _get_scale(q, scale))
    return tuple(map(to_device, gradients))


def attend_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **options: Any,
) -> Any:
    """Compute FlashAttention of (N, H, C) within segments, or of (B, T, H, C). Log-sum-exp: (H, N), or (B, H, T)."""
    check_flash(q, k, v)
    q, k, v = map(to_host, (q, k, v))
    out = torch.zeros_like(q)
    parts = []
    for rows, columns in _list_segments(q, k, cum_q, cum_k):
        parts.append(_attend_part(q, k, v, rows, columns, is_causal, scale, window_size_left, window_size_right))
        out[rows] = parts[-1][0]
    lse = torch.cat([lse for _, lse in parts], 1) if cum_q is not None else torch.stack([lse for _, lse in parts])
    empty = torch.empty(0, dtype=torch.int64)
    state = [to_device(x) for x in (torch.zeros(2, dtype=torch.int64), empty, out.new_empty(0))]
    return to_device(out), to_device(lse.contiguous()), *state


def attend_segments_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cum_q: Tensor | None,
    cum_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    """Compute the backward pass of `attend_segments`."""
    check_flash(dout, q, k, v, out)
    _check_dense(lse)
    segmented = cum_q is not None and cum_q.numel() > 0
    segments = _list_segments(q, k, cum_q if segmented else None, cum_k if segmented else None)
    dout, q, k, v, out, lse = map(to_host, (dout, q, k, v, out, lse))
    gradients = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for number, (rows, columns) in enumerate(segments):
        own_q, own_k, own_v = map(_swap, (q[rows], k[columns], v[columns]))
        own_lse = lse[None, :, rows] if segmented else lse[number][None]
        window = _get_width(window_size_left), _get_width(window_size_right)
        bias = make_bias(own_q.shape[2], own_k.shape[2], is_causal, *window)
        outputs = _swap(out[rows]), own_lse
        own_gradients = compute_gradients(_swap(dout[rows]), own_q, own_k, own_v, *outputs, bias, _get_scale(q, scale))
        for gradient, part, place in zip(gradients, own_gradients, (rows, columns, columns), strict=True):
            gradient[place] += part[0].transpose(0, 1)
    return tuple(map(to_device, gradients))


def _attend_part(
    q: Tensor, k: Tensor, v: Tensor, rows: Any, columns: Any, causal: bool, scale: Any, left: Any, right: Any
) -> tuple[Tensor, Tensor]:
    """Return the output (t, H, C) and log-sum-exp (H, t) of one segment."""
    own_q, own_k, own_v = map(_swap, (q[rows], k[columns], v[columns]))
    bias = make_bias(own_q.shape[2], own_k.shape[2], causal, _get_width(left), _get_width(right))
    out, lse = compute_attention(own_q, own_k, own_v, bias, _get_scale(q, scale))
    return out[0].transpose(0, 1), lse[0]


def _list_segments(q: Tensor, k: Tensor, cum_q: Tensor | None, cum_k: Tensor | None) -> list[tuple[Any, Any]]:
    """Return the queries and keys of each segment, as indices of the first dimension."""
    if cum_q is None or cum_k is None:
        return [(row, row) for row in range(len(q))]
    if cum_q.dtype != torch.int32 or cum_k.dtype != torch.int32:
        raise RuntimeError("FlashAttention needs the bounds of segments in int32")
    q_ends, k_ends = to_host(cum_q).tolist(), to_host(cum_k).tolist()
    if q_ends[-1] != len(q) or k_ends[-1] != len(k):
        raise RuntimeError(f"the segments end at {q_ends[-1]} and {k_ends[-1]} of {len(q)} queries and {len(k)} keys")
    pairs = zip(q_ends[:-1], q_ends[1:], k_ends[:-1], k_ends[1:], strict=True)
    return [(slice(a, b), slice(c, d)) for a, b, c, d in pairs]


def _swap(x_NHC: Tensor) -> Tensor:
    """Return (1, H, N, C)."""
    return x_NHC.transpose(0, 1)[None]


def _get_width(window: int | None) -> int:
    return -1 if window is None else window


def _get_scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _check_dense(lse: Tensor) -> None:
    if not lse.is_contiguous():
        raise RuntimeError("FlashAttention reads the log-sum-exp as contiguous memory, and its strides differ")


def attend_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """Compute memory-efficient attention with an additive mask."""
    q, k, v = map(to_host, (q, k, v))
    whole = _merge_bias(q, k, bias, is_causal)
    out, lse = compute_attention(q, k, v, whole, _get_scale(q, scale))
    empty = torch.zeros((), dtype=torch.int64)
    return to_device(out), to_device(lse), to_device(empty), to_device(empty.clone())


def attend_efficient_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout_p: float,
    grad_input_mask: list[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Compute the backward pass of `attend_efficient`, without a gradient of the mask."""
    if grad_input_mask[3]:
        raise NotImplementedError("the fake device computes no gradient of an attention mask")
    dout, q, k, v, out, lse = map(to_host, (dout, q, k, v, out, lse))
    whole = _merge_bias(q, k, bias, is_causal)
    gradients = compute_gradients(dout, q, k, v, out, lse, whole, _get_scale(q, scale))
    return (*map(to_device, gradients), torch.empty(0, device="cuda"))


def _merge_bias(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor | None:
    own = make_bias(q.shape[2], k.shape[2], causal)
    if bias is None or bias.numel() == 0:
        return own
    return to_host(bias).float() if own is None else to_host(bias).float() + own


def attend_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_aux: Any = None,
) -> tuple[Tensor, Any]:
    """Compute FlexAttention without its compiled kernel; return (output, object with the log-sum-exp)."""
    scores = q.float() @ _expand_heads(k.float(), q.shape[1]).mT * _get_scale(q, scale)
    sizes = scores.shape
    b, h, i, j = (
        torch.arange(size, device=q.device).view([-1 if axis == dim else 1 for axis in range(4)])
        for dim, size in enumerate(sizes)
    )
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    if block_mask is not None:
        scores = torch.where(block_mask.mask_mod(b, h, i, j), scores, -math.inf)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp() @ _expand_heads(v.float(), q.shape[1])
    return out.to(q.dtype), SimpleNamespace(lse=lse)
