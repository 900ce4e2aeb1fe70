"""Grouped GEMM: matmuls of rows sorted by expert; each expert's group of rows is multiplied by the expert's matrix.

A rows in E groups; the rows of group e are bounds[e] to bounds[e + 1], `bounds` (E + 1,). Measured on a CPU (float32
and bfloat16, 8 to 256 experts): `grouped_mm` is as fast as a loop over experts or up to 1.35 times faster. A padded
batched matmul is slower, except for bfloat16 groups of a few rows. All three give equal bits. `grouped_mm` rejects
float64 and widths that are not multiples of 16 bytes. A loop over experts computes these cases, and precisions that
override `compute_grad_x` or `compute_grad_w`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.precision import Precision


class GroupedMatmuls(ABC):
    """The three matmuls of linear layers with stacked weights: forward, input gradient, weight gradient."""

    @abstractmethod
    def multiply_rows(self, x_AI: Tensor, w_EOI: Tensor, bounds: Tensor) -> Tensor:
        """Return each row times the transposed matrix of its group, (A, O), as in a linear layer."""

    @abstractmethod
    def compute_grad_x(self, y_AO: Tensor, w_EOI: Tensor, bounds: Tensor) -> Tensor:
        """Return each row times the matrix of its group, (A, I): the input gradient of `multiply_rows`."""

    @abstractmethod
    def compute_grad_w(self, y_AO: Tensor, x_AI: Tensor, bounds: Tensor) -> Tensor:
        """Return yᵀ x of each group, (E, O, I): the weight gradient of `multiply_rows`."""


class PlainMatmuls(GroupedMatmuls):
    """Matmuls in the dtype of their inputs: `grouped_mm` if it supports them, otherwise one matmul per group."""

    def multiply_rows(self, x_AI: Tensor, w_EOI: Tensor, bounds: Tensor) -> Tensor:
        return _multiply_by_run(x_AI, w_EOI.transpose(1, 2), bounds)

    def compute_grad_x(self, y_AO: Tensor, w_EOI: Tensor, bounds: Tensor) -> Tensor:
        return _multiply_by_run(y_AO, w_EOI, bounds)

    def compute_grad_w(self, y_AO: Tensor, x_AI: Tensor, bounds: Tensor) -> Tensor:
        if len(x_AI) and _fits(x_AI, x_AI.shape[1], y_AO.shape[1]):
            return F.grouped_mm(y_AO.t(), x_AI, offs=bounds[1:].to(torch.int32))
        out = x_AI.new_zeros(len(bounds) - 1, y_AO.shape[1], x_AI.shape[1])
        for index, run in list_runs(x_AI, bounds):
            torch.mm(y_AO[run].t(), x_AI[run], out=out[index])
        return out


class PrecisionMatmuls(GroupedMatmuls):
    """Expert matmuls as a loop: one `precision.linear` (such as float8) per expert's contiguous rows."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def multiply_rows(self, x_AI: Tensor, w_EOI: Tensor, bounds: Tensor) -> Tensor:
        out = x_AI.new_zeros(len(x_AI), w_EOI.shape[1])
        for index, run in list_runs(x_AI, bounds):
            out[run] = self.precision.linear(x_AI[run], w_EOI[index])
        return out

    def compute_grad_x(self, y_AO: Tensor, w_EOI: Tensor, bounds: Tensor) -> Tensor:
        out = y_AO.new_zeros(len(y_AO), w_EOI.shape[2])
        for index, run in list_runs(y_AO, bounds):
            out[run] = self.precision.compute_grad_x(y_AO[run], w_EOI[index])
        return out

    def compute_grad_w(self, y_AO: Tensor, x_AI: Tensor, bounds: Tensor) -> Tensor:
        out = x_AI.new_zeros(len(bounds) - 1, y_AO.shape[1], x_AI.shape[1])
        for index, run in list_runs(x_AI, bounds):
            out[index] = self.precision.compute_grad_w(y_AO[run], x_AI[run])
        return out


def choose_matmuls(precision: Precision) -> GroupedMatmuls:
    """Return grouped matmuls, or loops of matmuls if a precision (float8) overrides `compute_grad_x` or `_grad_w`."""
    plain = (
        type(precision).compute_grad_x is Precision.compute_grad_x
        and type(precision).compute_grad_w is Precision.compute_grad_w
    )
    return PlainMatmuls() if plain else PrecisionMatmuls(precision)


def list_runs(rows: Tensor, bounds: Tensor) -> list[tuple[int, slice]]:
    """Return (index, slice) of each group with rows; [] on the meta device. The host waits for the device."""
    if rows.is_meta:
        return []
    return [(i, slice(start, stop)) for i, (start, stop) in enumerate(pairwise(bounds.tolist())) if stop > start]


def _multiply_by_run(x_AI: Tensor, w_EIO: Tensor, bounds: Tensor) -> Tensor:
    if len(x_AI) and _fits(x_AI, *w_EIO.shape[1:]):
        return F.grouped_mm(x_AI, w_EIO, offs=bounds[1:].to(torch.int32))
    out = x_AI.new_empty(len(x_AI), w_EIO.shape[2])
    for index, run in list_runs(x_AI, bounds):
        torch.mm(x_AI[run], w_EIO[index], out=out[run])
    return out


def _fits(x: Tensor, *widths: int) -> bool:
    """Return whether `grouped_mm` supports matrices of this dtype and these widths (if compiled, only bfloat16)."""
    if x.dtype == torch.float64 or x.is_meta or (x.dtype != torch.bfloat16 and torch.compiler.is_compiling()):
        return False
    return all(width * x.element_size() % 16 == 0 for width in widths)
