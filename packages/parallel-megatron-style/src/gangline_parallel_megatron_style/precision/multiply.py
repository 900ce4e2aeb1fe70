"""A Bᵀ of two float8 matrices: by the tensor cores of a GPU, or by the same numbers in float32 on a CPU.

M rows of A, O features out (the rows of B), I features in (the columns of both)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline_parallel_megatron_style.precision.formats import Grain, Quantised


def multiply(a: Quantised, b: Quantised, dtype: torch.dtype) -> Tensor:
    """(M, I), (O, I) -> (M, O): summed in float32, then rounded to `dtype`.

    On a CPU, of dequantised values: these are exact in float32, and so are the bits those of torch's scaled product.
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
    """Scales in the shape and order in memory that cuBLAS reads."""
    if q.grain is Grain.TILE:  # rows next to each other
        return q.scale.t().contiguous().t()
    if q.grain is Grain.BLOCK:  # along I next to each other, filled up to a multiple of four
        return F.pad(q.scale, (0, -q.scale.shape[1] % 4)).t()
    return q.scale
