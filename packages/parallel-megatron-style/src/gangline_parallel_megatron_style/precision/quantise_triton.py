"""Triton kernels that quantise a matrix of any strides to float8, bitwise equal to the plain operators.

The kernels pass over the matrix once if a tile has all values that share a scale, else twice. Measured on an H100: a
linear layer of 4096 x 14336 over 8192 tokens, forward and backward, with quantisation of the six operands. Speed
relative to bfloat16: 1.32 with one scale per tensor, 1.23 per row, 1.22 per block; with plain operators 0.55, 0.51 and
0.42.

M rows, F features, over which a matmul sums
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gangline_parallel_megatron_style.precision.formats import ALIGNED, SMALLEST, Format, Grain, Quantised

# granularity of scales -> (rows of a tile, columns of a tile, warps for a tile)
TILES = {Grain.TENSOR: (128, 128, 8), Grain.ROW: (128, 128, 8), Grain.TILE: (64, 128, 4), Grain.BLOCK: (128, 128, 8)}


@triton.jit
def _load_tile(x, m, f, M, F, stride_m, stride_f):
    there = (m < M)[:, None] & (f < F)[None, :]
    return tl.load(x + m[:, None] * stride_m + f[None, :] * stride_f, there, other=0.0).to(tl.float32)


@triton.jit
def _get_magnitude_bits(x):
    # A maximum of floats drops NaN; a maximum of the floats' bits as integers keeps NaN.
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _compute_scale(bits, INVERSE: tl.constexpr, SMALLEST: tl.constexpr):
    # Equal to `precision.quantise.compute_scale`. INVERSE: inverse of the format's largest power of two.
    reduced = bits.to(tl.float32, bitcast=True) * INVERSE
    below = (reduced.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    scale = tl.where(reduced > 1.75 * below, 2 * below, below)
    return tl.where(scale < SMALLEST, SMALLEST, scale)


@triton.jit
def _find_largest(
    x, largest, M, F, stride_m, stride_f, OF_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    of_row = tl.max(_get_magnitude_bits(_load_tile(x, m, f, M, F, stride_m, stride_f)), 1)
    if OF_ROWS:
        tl.atomic_max(largest + m, of_row, m < M)
    else:
        tl.atomic_max(largest, tl.max(of_row, 0))


@triton.jit
def _quantise_tile(
    x,
    largest,
    values,
    scales,
    M,
    F,
    stride_m,
    stride_f,
    padded_m,
    padded_f,
    GRAIN: tl.constexpr,
    INVERSE: tl.constexpr,
    SMALLEST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    m = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    f = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    x_tile = _load_tile(x, m, f, M, F, stride_m, stride_f)
    inside, first = m < padded_m, tl.program_id(1) == 0
    if GRAIN == "TENSOR":
        scale = _compute_scale(tl.load(largest), INVERSE, SMALLEST)
        tl.store(scales, scale, first & (tl.program_id(0) == 0))
        x_tile = x_tile * (1.0 / scale)
    elif GRAIN == "ROW":
        scale = _compute_scale(tl.load(largest + m, inside, other=0), INVERSE, SMALLEST)
        tl.store(scales + m, scale, inside & first)
        x_tile = x_tile * (1.0 / scale)[:, None]
    elif GRAIN == "TILE":
        scale = _compute_scale(tl.max(_get_magnitude_bits(x_tile), 1), INVERSE, SMALLEST)
        tl.store(scales + m * tl.num_programs(1) + tl.program_id(1), scale, inside)
        x_tile = x_tile * (1.0 / scale)[:, None]
    else:
        scale = _compute_scale(tl.max(tl.max(_get_magnitude_bits(x_tile), 1), 0), INVERSE, SMALLEST)
        tl.store(scales + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), scale)
        x_tile = x_tile * (1.0 / scale)
    tl.store(
        values + m[:, None] * padded_f + f[None, :],
        x_tile.to(values.dtype.element_ty, fp_downcast_rounding="rtne"),
        inside[:, None] & (f < padded_f)[None, :],
    )


def quantise(x_MF: Tensor, form: Format, grain: Grain, dtype: torch.dtype | None = None) -> Quantised:
    """Quantise a matrix like `precision.quantise.quantise`.

    dtype: dtype of the values, if they are scaled but not rounded to `form`
    """
    (M, F), (rows, columns, warps) = x_MF.shape, TILES[grain]
    sides = [max(ALIGNED, side or 0) for side in grain.value]
    padded = [triton.cdiv(size, side) * side for size, side in zip(x_MF.shape, sides, strict=True)]
    scale_shape = [size // (side or size) for size, side in zip(padded, grain.value, strict=True)]
    scales = torch.empty(scale_shape, dtype=torch.float32, device=x_MF.device)
    values = torch.empty(padded, dtype=dtype or form.dtype, device=x_MF.device)
    grid = (triton.cdiv(padded[0], rows), triton.cdiv(padded[1], columns))
    geometry = (M, F, *x_MF.stride())
    largest = scales
    if grain in (Grain.TENSOR, Grain.ROW):
        largest = torch.zeros(scale_shape, dtype=torch.int32, device=x_MF.device)
        _find_largest[grid](x_MF, largest, *geometry, grain is Grain.ROW, rows, columns, num_warps=warps)
    formats = (grain.name, 2.0**-form.exponent, SMALLEST)
    _quantise_tile[grid](x_MF, largest, values, scales, *geometry, *padded, *formats, rows, columns, num_warps=warps)
    return Quantised(values, scales, grain)
