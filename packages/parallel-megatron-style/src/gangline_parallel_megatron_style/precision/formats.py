"""Float8 formats, the granularity of scales, and quantised matrices (values and scales).

M rows, F features
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

ALIGNED = 16  # GPUs multiply float8 matrices only if the matrix dims are multiples of 16
SMALLEST = 2.0**-126  # minimum scale: the smallest normal float32, whose inverse is finite


class Format(Enum):
    """A float8 format (Micikevicius et al., FP8 Formats for Deep Learning, arXiv 2209.05433, section 3)."""

    E4M3 = torch.float8_e4m3fn, 8  # largest finite value 1.75 * 2^8 = 448; normal down to 2^-6; no infinity
    E5M2 = torch.float8_e5m2, 15  # largest finite value 1.75 * 2^15 = 57344; normal down to 2^-14

    def __init__(self, dtype: torch.dtype, exponent: int) -> None:
        self.dtype, self.exponent = dtype, exponent


class Grain(Enum):
    """Granularity of scales: number of (rows, columns) that share a scale; None: all rows or columns."""

    TENSOR = None, None
    ROW = 1, None
    TILE = 1, 128
    BLOCK = 128, 128


@dataclass(frozen=True)
class Quantised:
    """A quantised matrix: padded `values` (M, F) in float8, `scale` (M / rows, F / columns of `grain`) in float32."""

    values: Tensor
    scale: Tensor
    grain: Grain

    def dequantise(self) -> Tensor:
        """Return the padded matrix (M, F) in float32, without rounding."""
        scaled = split_parts(self.values.float(), self.grain) * self.scale[:, None, :, None]
        return scaled.view(self.values.shape)


def split_parts(x_MF: Tensor, grain: Grain) -> Tensor:
    """Return (M, F) as a view of shape (M / rows, rows, F / columns, columns)."""
    rows, columns = (side or whole for side, whole in zip(grain.value, x_MF.shape, strict=True))
    return x_MF.view(x_MF.shape[0] // rows, rows, x_MF.shape[1] // columns, columns)
