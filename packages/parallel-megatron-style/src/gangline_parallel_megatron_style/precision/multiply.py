"""Matmul A Bᵀ of two float8 matrices: on the tensor cores of a GPU, or emulated in float32 on a CPU.

M rows of A, O features out (the rows of B), I features in (the columns of both)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline_parallel_megatron_style.precision.formats import Grain, Quantised


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """Return A Bᵀ (M, O) of quantised matrices A (M, I) and B (O, I), summed in float32, then rounded to `dtype`.

    On a CPU the operands are dequantised first, which is exact in float32: the result is bitwise equal to torch's
    scaled matmul.
    """
    if a.values.device.type == "cpu":
        return (a.dequantise() @ b.dequantise().t()).to(dtype)
    scaling = F.ScalingType
    recipes = {
        Grain.TENSOR: scaling.TensorWise,
        Grain.ROW: scaling.RowWise,
        Grain.TILE: scaling.BlockWise1x128,
        Grain.BLOCK: scaling.BlockWise128x128,
    }
    return F.scaled_mm(
        a.values,
        b.values.t(),
        _lay_out(a),
        recipes[a.grain],
        _lay_out(b).t() if b.grain is Grain.ROW else _lay_out(b),
        recipes[b.grain],
        output_dtype=dtype,
    )


def _lay_out(q: Quantised) -> Tensor:
    """Return the scales in the shape and memory order that cuBLAS reads."""
    if q.grain is Grain.TILE:  # scales of adjacent rows must be adjacent in memory
        return q.scale.t().contiguous().t()
    if q.grain is Grain.BLOCK:  # scales along I must be adjacent, padded to a multiple of four
        return F.pad(q.scale, (0, -q.scale.shape[1] % 4)).t()
    return q.scale
