"""Matrices in float8: values, and scales that are powers of two.

A scale that is a power of two moves the exponent and rounds nothing. What a value becomes then hardly depends on what
else shares its scale: a matrix that is cut over ranks has the same float8 values as the whole one, except those so far
below the largest that float8 has no normal number for them. No value saturates: the scale is large enough for all.

M rows, F features, which a product sums over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.model.kernels import takes_kernels

ALIGNED = 16  # GPUs multiply float8 matrices whose sides are multiples of this
SMALLEST = 2.0**-126  # the smallest scale: its inverse is still a normal number


class Format(Enum):
    """A float8 format (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, section 3)."""

    E4M3 = torch.float8_e4m3fn, 8  # finite ones up to 1.75 * 2^8 = 448; normal down to 2^-6; no infinity
    E5M2 = torch.float8_e5m2, 15  # finite ones up to 1.75 * 2^15 = 57344; normal down to 2^-14

    def __init__(self, dtype: torch.dtype, exponent: int) -> None:
        self.dtype, self.exponent = dtype, exponent


class Grain(Enum):
    """(rows, columns) that share a scale; None for all of them."""

    TENSOR = None, None
    ROW = 1, None
    TILE = 1, 128
    BLOCK = 128, 128


@dataclass(frozen=True)
class Quantised:
    """`values` (M, F) in float8 and `scale` (M / rows, F / columns of `grain`) in float32; rows and columns padded."""

    values: Tensor
    scale: Tensor
    grain: Grain

    def dequantised(self) -> Tensor:
        """(M, F) in float32, exact."""
        scaled = _parted(self.values.float(), self.grain) * self.scale[:, None, :, None]
        return scaled.view(self.values.shape)


def quantise(x_MF: Tensor, form: Format, grain: Grain) -> Quantised:
    """Round a matrix that is not empty to float8, zeros added to fill its last block.

    An infinity or NaN makes all that shares its scale NaN: the scale is infinite, and zero times infinity is NaN.
    """
    if takes_kernels(x_MF):
        from gangline_parallel_megatron_style.precision import quantise_triton

        return quantise_triton.quantise(x_MF, form, grain)
    rows, columns = (max(ALIGNED, side or 0) for side in grain.value)
    x_MF = F.pad(x_MF, (0, -x_MF.shape[1] % columns, 0, -x_MF.shape[0] % rows))
    parted = _parted(x_MF, grain)
    scale = power_of_two(parted.abs().amax((1, 3)).float(), form)
    values = (parted * scale.reciprocal().to(x_MF.dtype)[:, None, :, None]).to(form.dtype)
    return Quantised(values.reshape(x_MF.shape).contiguous(), scale, grain)  # transposed, if it is, by single bytes


def power_of_two(largest: Tensor, form: Format) -> Tensor:
    """The smallest powers of two that numbers up to `largest` (float32) are divided by to fit in `form`.

    At least `SMALLEST`; infinite for what is not finite.
    """
    reduced = largest * 2.0**-form.exponent
    below = (reduced.view(torch.int32) & 0x7F800000).view(
        torch.float32
    )  # the exponent alone; that of NaN is infinity's
    return torch.where(reduced > 1.75 * below, 2 * below, below).clamp(min=SMALLEST)


def _parted(x_MF: Tensor, grain: Grain) -> Tensor:
    """(M, F) -> (M / rows, rows, F / columns, columns), a view."""
    rows, columns = (side or whole for side, whole in zip(grain.value, x_MF.shape, strict=True))
    return x_MF.view(x_MF.shape[0] // rows, rows, x_MF.shape[1] // columns, columns)
