"""Precisions that are defined by their dtypes alone."""

from __future__ import annotations

from abc import ABC

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.config.schema import PrecisionConfig, Run
from gangline.precision import Precision


class CastPrecision(Precision, ABC):
    """Matmuls in the dtype `compute`; master weights, reduced gradients and stored gradients in the dtype `kept`."""

    def __init__(self, compute: torch.dtype, kept: torch.dtype) -> None:
        self.compute_dtype = compute
        self.param_dtype = self.reduce_dtype = self.grad_dtype = kept

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return F.linear(x.to(self.compute_dtype), w, b)


class Plain(CastPrecision):
    """Precision without loss scale and state."""


def build_fp32(config: PrecisionConfig, run: Run) -> Plain:
    """Return the precision `fp32`."""
    return Plain(torch.float32, torch.float32)


def build_fp64(config: PrecisionConfig, run: Run) -> Plain:
    """Return the precision `fp64`."""
    return Plain(torch.float64, torch.float64)


def build_bf16(config: PrecisionConfig, run: Run) -> Plain:
    """Return the precision `bf16`."""
    return Plain(torch.bfloat16, torch.float32)
