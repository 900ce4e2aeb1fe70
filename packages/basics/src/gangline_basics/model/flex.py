"""Attention with windows, soft caps and sinks by FlexAttention, on CUDA.

FlexAttention is imported and compiled only when a GPU needs it. A compiled block calls it outside of its graph: the
block mask depends on the documents of a batch and serves all layers, and the kernel is then the same as without
run.compile.

B batch, T tokens, H query heads, K key and value heads, C width of a head
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gangline.model.calls import AttentionCall
from gangline.model.untraced import untraced
from gangline_basics.model.last_value_cache import LastValueCache

DEVICES = ("cuda",)  # types of devices with kernels for both passes
SMALLEST_WIDTH = 16  # smallest head width of the kernels; they pad a width that is not a power of two


def takes(q_BHTC: Tensor) -> bool:
    """Return whether FlexAttention supports these queries: on CUDA, with a dtype and head width of its kernels."""
    if torch.compiler.is_compiling() and not attend_in_blocks.is_out:
        return False
    return q_BHTC.device.type in DEVICES and q_BHTC.dtype != torch.float64 and q_BHTC.shape[-1] >= SMALLEST_WIDTH


@untraced  # the block mask depends on the batch, so a compiled graph would make it again in every layer
def attend_in_blocks(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    document_BT: Tensor | None,
    position_BT: Tensor,
    sinks_H: Tensor | None,
    call: AttentionCall,
    cache: LastValueCache,
) -> Tensor:
    """Return (B, H, T, C) as `AttentionCall` defines. cache: cache of the block mask for the next layer."""
    source_BT = position_BT if document_BT is None else document_BT
    mask = cache("blocks", source_BT, lambda: make_block_mask(call, document_BT, position_BT))
    return attend_flex(q_BHTC, k_BKTC, v_BKTC, mask, call, sinks_H)


def make_block_mask(call: AttentionCall, document_BT: Tensor | None, position_BT: Tensor, compiled: bool = True) -> Any:
    """Return FlexAttention's block mask of visible keys, for unsharded sequences; all layers of a batch share it."""
    from torch.nn.attention.flex_attention import create_block_mask

    def is_visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        mask = i >= j if call.causal else i == i
        if document_BT is not None:
            mask = mask & (document_BT[b, i] == document_BT[b, j])
        if call.window is not None:
            mask = mask & (position_BT[b, i] - position_BT[b, j] < call.window)
        return mask

    B, T = position_BT.shape
    return create_block_mask(is_visible, B, None, T, T, device=position_BT.device, _compile=compiled)


@lru_cache(maxsize=1)
def _make_kernel() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention)


def attend_flex(
    q_BHTC: Tensor,
    k_BKTC: Tensor,
    v_BKTC: Tensor,
    mask: Any,
    call: AttentionCall,
    sinks_H: Tensor | None,
    kernel: Callable[..., Any] | None = None,
) -> Tensor:
    """Return (B, H, T, C) as `AttentionCall` defines. A sink scales the output by the probability of all keys."""
    from torch.nn.attention.flex_attention import AuxRequest

    cap = call.soft_cap or 1.0

    def cap_score(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    out, aux = (kernel or _make_kernel())(
        q_BHTC,
        k_BKTC,
        v_BKTC,
        score_mod=None if call.soft_cap is None else cap_score,
        block_mask=mask,
        scale=call.scale,
        enable_gqa=q_BHTC.shape[1] != k_BKTC.shape[1],
        return_aux=AuxRequest(lse=True),
    )
    if sinks_H is None:
        return out
    left_BHT = (aux.lse - sinks_H.to(aux.lse.dtype)[None, :, None]).sigmoid()
    return out * left_BHT[..., None].to(out.dtype)
