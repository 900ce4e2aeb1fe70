"""Attention within documents that are packed in the rows of a batch, without a T² mask.

On the CPU the flash kernel processes one document after another; on CUDA torch's varlen attention processes all
documents at once, given the end of each document. A document's scores do not depend on its neighbours.

B batch, T tokens, H query heads, K key and value heads, C width of a head
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gangline.data.expand import send
from gangline.model.calls import AttentionCall
from gangline.model.document_ends import find_ends, get_ends
from gangline.model.untraced import untraced
from gangline_basics.model.last_value_cache import LastValueCache

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class DocumentSpans:
    """Positions of the documents in B rows of T tokens.

    spans    (first row, last row + 1, first token, last token + 1): rows with the same document ends share an entry
    bounds   (n + 1,) int32, in the host's memory: 0, and the ends of the documents of all rows, concatenated
    longest  length of the longest document, in tokens
    """

    spans: tuple[tuple[int, int, int, int], ...]
    bounds: Tensor
    longest: int

    @classmethod
    def of(cls, document_BT: Tensor) -> DocumentSpans | None:
        """Return the spans, or None if the document numbers decrease within a row.

        If the host does not know the ends (`tell_ends`), this synchronizes with the device.
        """
        B, T = document_BT.shape
        ends = get_ends(document_BT)
        if ends is None:
            if bool((document_BT[:, 1:] < document_BT[:, :-1]).any()):
                return None
            ends = find_ends(document_BT)
        bounds = torch.cat((torch.zeros(1, dtype=torch.int32), ends))
        rows: list[list[int]] = [[] for _ in range(B)]
        for end in ends.tolist():
            rows[(end - 1) // T].append((end - 1) % T + 1)
        spans: list[tuple[int, int, int, int]] = []
        first = 0
        for row in range(1, B + 1):
            if row == B or rows[row] != rows[first]:
                starts = [0, *rows[first][:-1]]
                spans += [(first, row, start, stop) for start, stop in zip(starts, rows[first], strict=True)]
                first = row
        return cls(tuple(spans), bounds, int(bounds.diff().max()))


def takes(call: AttentionCall, q_BHTC: Tensor, sinks_H: Tensor | None) -> bool:
    """Return whether a document kernel supports this call and these queries."""
    if call.window is not None or call.soft_cap is not None or sinks_H is not None:
        return False
    if torch.compiler.is_compiling() and not attend_documents.is_out:
        return False
    if q_BHTC.is_cuda:
        width = q_BHTC.shape[-1]
        return q_BHTC.dtype in (torch.bfloat16, torch.float16) and width % 8 == 0 and width <= 256
    return q_BHTC.device.type == "cpu"


@untraced  # document boundaries depend on the batch, so they cannot be in a compiled graph
def attend_documents(
    q_BHTC: Tensor, k_BKTC: Tensor, v_BKTC: Tensor, document_BT: Tensor, call: AttentionCall, cache: LastValueCache
) -> Tensor | None:
    """Return attention (B, H, T, C) in which each query sees the keys of its document, only up to itself if causal.

    Returns None if the document numbers decrease within a row, or if this torch has no such kernel. cache: cache of
    the spans for the next layer.
    """
    if q_BHTC.is_cuda and _find_kernel() is None:
        return None
    spans: DocumentSpans | None = cache("documents", document_BT, lambda: DocumentSpans.of(document_BT))
    if spans is None:
        return None
    if q_BHTC.is_cuda:
        return attend_varlen(q_BHTC, k_BKTC, v_BKTC, spans, call)
    return _Within.apply(q_BHTC, k_BKTC, v_BKTC, spans.spans, call.causal, call.scale)


class _Within(torch.autograd.Function):
    """CPU flash kernel, called for each span. Through slices, autograd would allocate a full-size gradient per span."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        spans: Sequence[tuple[int, int, int, int]],
        causal: bool,
        scale: float | None,
    ) -> Tensor:
        q, k, v = (_make_rows_dense(x) for x in (q, k, v))
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for place in spans:
            here, lse_here = _forward(_cut(q, place), _cut(k, place), _cut(v, place), 0.0, causal, scale=scale)
            _cut(out, place).copy_(here)
            _cut(lse, place).copy_(lse_here)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spans, ctx.causal, ctx.scale = spans, causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradients = tuple(torch.empty_like(x) for x in (q, k, v))
        grad = _make_rows_dense(grad)
        for place in ctx.spans:
            slices = (_cut(x, place) for x in (grad, q, k, v, out, lse))
            parts = _backward(*slices, 0.0, ctx.causal, scale=ctx.scale)
            for whole, part in zip(gradients, parts, strict=True):
                _cut(whole, place).copy_(part)
        return (*gradients, None, None, None)


def _make_rows_dense(x: Tensor) -> Tensor:
    """Return `x` with stride 1 in the last dim, which flash kernels assume without a check.

    torch.cat may return a channels_last tensor, for example in the rotation of heads of width 2.
    """
    return x if x.stride(-1) == 1 else x.contiguous()


def _cut(x: Tensor, place: tuple[int, int, int, int]) -> Tensor:
    first, last, start, stop = place
    return x[first:last, :, start:stop]


def attend_varlen(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    spans: DocumentSpans,
    call: AttentionCall,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Return attention by torch's varlen kernel on concatenated rows. Not yet run on a GPU; tests use other kernels."""
    B, T = q_BHTC.shape[0], q_BHTC.shape[2]
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHTC, k_BKTC, v_BKTC))
    q, k, v = (_make_rows_dense(x) for x in (q, k, v))
    bounds = send(spans.bounds, q.device)
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    window = (-1, 0) if call.causal else (-1, -1)
    kernel = kernel or _find_kernel()
    assert kernel is not None, "torch has no varlen attention with scale, window_size and enable_gqa"
    out = kernel(q, k, v, bounds, bounds, spans.longest, spans.longest, scale=call.scale, window_size=window, **grouped)
    return out.unflatten(0, (B, T)).transpose(1, 2)


@lru_cache(maxsize=1)
def _find_kernel() -> Callable[..., Any] | None:
    """Return torch's varlen attention, or None if it lacks a keyword argument, as in torch 2.10 (2.12 has all)."""
    from torch.nn.attention.varlen import varlen_attn

    parameters = inspect.signature(varlen_attn).parameters
    return varlen_attn if {"scale", "window_size", "enable_gqa"} <= parameters.keys() else None
