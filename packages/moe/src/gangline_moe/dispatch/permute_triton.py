"""Triton kernels for the sum of each token's rows and for its gradients, which read and write each row once.

Measured on an H100 with 16384 tokens of 8 rows each, 2048 wide, in bfloat16: 0.21 ms per sum and 0.41 ms per
backward pass. The plain operators take 2.9 ms (with weights) or 1.3 ms per sum, and 2.9 ms per backward pass. One read
of all rows takes 0.18 ms.

N tokens, k experts per token, A rows (one per (token, expert) pair), D model width
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 2048, 4  # elements of a row per iteration, and number of warps


@triton.jit
def _gather_rows_kernel(rows, place, weight, out, D, K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        x = tl.load(rows + row * D + column, (column < D) & (row >= 0), other=0.0).to(tl.float32)
        total += x * tl.load(weight + token * K + j).to(tl.float32) if WEIGHTED else x
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), column < D)


@triton.jit
def _gather_gradients_kernel(dy, rows, place, weight, drows, dweight, D, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(K):
        row = tl.load(place + token * K + j)
        factor = tl.load(weight + token * K + j).to(tl.float32)
        products = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, D, BLOCK):
            column = start + tl.arange(0, BLOCK)
            there = (column < D) & (row >= 0)
            d = tl.load(dy + token * D + column, column < D, other=0.0).to(tl.float32)
            products += d * tl.load(rows + row * D + column, there, other=0.0).to(tl.float32)
            tl.store(drows + row * D + column, (d * factor).to(drows.dtype.element_ty), there)
        tl.store(dweight + token * K + j, tl.sum(products, 0).to(dweight.dtype.element_ty))


def gather_rows(rows_AD: Tensor, place_Nk: Tensor, weight_Nk: Tensor | None) -> Tensor:
    """Return Σ_j weight[n, j] · rows[place[n, j]], (N, D), in the rows' dtype, added in float32; place -1 adds 0."""
    (N, k), D = place_Nk.shape, rows_AD.shape[1]
    out_ND = rows_AD.new_empty(N, D)
    if N:
        block = _choose_block(D)
        weight = place_Nk if weight_Nk is None else weight_Nk.contiguous()
        _gather_rows_kernel[(N, triton.cdiv(D, block))](
            *(rows_AD.contiguous(), place_Nk.contiguous(), weight, out_ND, D, k, weight_Nk is not None, block),
            num_warps=WARPS,
        )
    return out_ND


def gather_gradients(dy_ND: Tensor, rows_AD: Tensor, place_Nk: Tensor, weight_Nk: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of rows (A, D) and weights (N, k), given `dy_ND`, the gradient of `gather_rows`' output."""
    (N, k), D = place_Nk.shape, rows_AD.shape[1]
    drows_AD, dweight_Nk = torch.empty_like(rows_AD), torch.empty_like(weight_Nk, memory_format=torch.contiguous_format)
    if N:
        inputs = (dy_ND.contiguous(), rows_AD, place_Nk.contiguous(), weight_Nk.contiguous())
        _gather_gradients_kernel[(N,)](*inputs, drows_AD, dweight_Nk, D, k, _choose_block(D), num_warps=WARPS)
    return drows_AD, dweight_Nk


def _choose_block(D: int) -> int:
    return min(BLOCK, triton.next_power_of_2(D))
