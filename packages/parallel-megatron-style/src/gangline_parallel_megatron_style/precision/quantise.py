"""Quantisation to float8: values, and scales that are powers of two.

A scale that is a power of two changes only the exponent, without rounding. So the float8 result of a value hardly
depends on the other values that share its scale: a shard of a matrix gets the float8 values of the full matrix, except
values so far below the largest value that they are subnormal in float8. No value saturates, because the scale is large
enough for the largest value.

M rows, F features, over which a matmul sums
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline_basics.model.kernels import takes_kernels
from gangline_parallel_megatron_style.precision.formats import ALIGNED, SMALLEST, Format, Grain, Quantised, split_parts


def quantise(x_MF: Tensor, form: Format, grain: Grain) -> Quantised:
    """Quantise a non-empty matrix to float8, padded with zeros to complete blocks.

    An infinity or a NaN makes all values that share its scale NaN after dequantisation: the scale is infinite, and zero
    times infinity is NaN.
    """
    if takes_kernels(x_MF):
        from gangline_parallel_megatron_style.precision import quantise_triton

        return quantise_triton.quantise(x_MF, form, grain)
    rows, columns = (max(ALIGNED, side or 0) for side in grain.value)
    x_MF = F.pad(x_MF, (0, -x_MF.shape[1] % columns, 0, -x_MF.shape[0] % rows))
    parted = split_parts(x_MF, grain)
    scale = compute_scale(parted.abs().amax((1, 3)).float(), form)
    values = (parted * scale.reciprocal().to(x_MF.dtype)[:, None, :, None]).to(form.dtype)
    return Quantised(values.reshape(x_MF.shape).contiguous(), scale, grain)  # copies a transposed input


def compute_scale(largest: Tensor, form: Format) -> Tensor:
    """Return scales: the smallest powers of two such that `largest` (float32) / scale fits in `form`.

    A scale is at least `SMALLEST`, and infinite if `largest` is not finite.
    """
    reduced = largest * 2.0**-form.exponent
    below = (reduced.view(torch.int32) & 0x7F800000).view(torch.float32)  # 2^exponent; a NaN becomes inf
    return torch.where(reduced > 1.75 * below, 2 * below, below).clamp(min=SMALLEST)
