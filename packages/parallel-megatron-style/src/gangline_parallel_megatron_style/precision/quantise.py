"""Matrices in float8: values, and scales that are powers of two.

A scale that is a power of two moves the exponent and rounds nothing. What a value becomes then hardly depends on what
else shares its scale: a matrix that is cut over ranks has the same float8 values as the whole one, except those so far
below the largest that float8 has no normal number for them. No value saturates: the scale is large enough for all.

M rows, F features, which a product sums over.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline_basics.model.kernels import takes_kernels
from gangline_parallel_megatron_style.precision.formats import ALIGNED, SMALLEST, Format, Grain, Quantised, split_parts


def quantise(x_MF: Tensor, form: Format, grain: Grain) -> Quantised:
    """Round a matrix that is not empty to float8, zeros added to fill its last block.

    An infinity or NaN makes all that shares its scale NaN: the scale is infinite, and zero times infinity is NaN.
    """
    if takes_kernels(x_MF):
        from gangline_parallel_megatron_style.precision import quantise_triton

        return quantise_triton.quantise(x_MF, form, grain)
    rows, columns = (max(ALIGNED, side or 0) for side in grain.value)
    x_MF = F.pad(x_MF, (0, -x_MF.shape[1] % columns, 0, -x_MF.shape[0] % rows))
    parted = split_parts(x_MF, grain)
    scale = compute_scale(parted.abs().amax((1, 3)).float(), form)
    values = (parted * scale.reciprocal().to(x_MF.dtype)[:, None, :, None]).to(form.dtype)
    return Quantised(values.reshape(x_MF.shape).contiguous(), scale, grain)  # transposed, if it is, by single bytes


def compute_scale(largest: Tensor, form: Format) -> Tensor:
    """The smallest powers of two that numbers up to `largest` (float32) are divided by to fit in `form`.

    At least `SMALLEST`; infinite for what is not finite.
    """
    reduced = largest * 2.0**-form.exponent
    below = (reduced.view(torch.int32) & 0x7F800000).view(
        torch.float32
    )  # the exponent alone; that of NaN is infinity's
    return torch.where(reduced > 1.75 * below, 2 * below, below).clamp(min=SMALLEST)
