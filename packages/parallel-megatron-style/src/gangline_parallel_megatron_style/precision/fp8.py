"""FP8 matmuls in a run that otherwise computes in bfloat16.

Each of the three matmuls of a linear layer quantises its two operands just before the matmul, with scales computed from
their current values ("current" or "dynamic" scaling), without state or warm-up:

    forward    x (.., in)     W  (out, in)     sums over in
    grad_x     dy (.., out)   Wᵀ (in, out)     sums over out
    grad_w     dyᵀ (out, ..)  xᵀ (in, ..)      sums over the tokens

    scaling  x, xᵀ    W, Wᵀ      dy, dyᵀ        one scale for
    tensor   e4m3     e4m3       e5m2           the full operand
    row      e4m3     e4m3       e4m3           a row of the operand: the numbers that are summed to one result
    block    e4m3     e4m3       e4m3           1 x 128 of x and dy, 128 x 128 of W

Gradients span many powers of two. If a full tensor shares a scale, gradients get e5m2, which has twice the exponents of
e4m3 and half the resolution (arXiv 2209.05433, section 4). If few numbers share a scale, e4m3 has enough range
(DeepSeek-V3, arXiv 2412.19437, section 3.3.2, the source of block scaling).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gangline.config import Run
from gangline.precision import Precision
from gangline_parallel_megatron_style.precision.config import Fp8
from gangline_parallel_megatron_style.precision.device import refuse
from gangline_parallel_megatron_style.precision.formats import Format, Grain
from gangline_parallel_megatron_style.precision.multiply import multiply
from gangline_parallel_megatron_style.precision.quantise import quantise


@dataclass(frozen=True)
class Recipe:
    """FP8 recipe: format of gradients, and scaling granularity of activations and of weights."""

    gradients: Format
    activations: Grain
    weights: Grain


RECIPES = {
    "tensor": Recipe(Format.E5M2, Grain.TENSOR, Grain.TENSOR),
    "row": Recipe(Format.E4M3, Grain.ROW, Grain.ROW),
    "block": Recipe(Format.E4M3, Grain.TILE, Grain.BLOCK),
}


class Fp8Precision(Precision):
    """Precision with matmuls of `Linear` in float8, other compute in bfloat16, parameters and gradients in float32."""

    param_dtype = reduce_dtype = grad_dtype = torch.float32
    compute_dtype = torch.bfloat16

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    def linear(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        return _Linear.apply(x, w, b, self)

    def compute_matmul(self, x: Tensor, w: Tensor) -> Tensor:
        """Compute x Wᵀ (.., out) in float8, without a bias and without a backward pass."""
        y_NF = self._multiply(_flatten_rows(x), Format.E4M3, w, self.recipe.weights)
        return _restore_shape(y_NF, x)

    def compute_grad_x(self, dy: Tensor, w: Tensor) -> Tensor:
        dx_NF = self._multiply(_flatten_rows(dy), self.recipe.gradients, w.t(), self.recipe.weights)
        return _restore_shape(dx_NF, dy).to(w.dtype)

    def compute_grad_w(self, dy: Tensor, x: Tensor) -> Tensor:
        return self._multiply(
            _flatten_rows(dy).t(), self.recipe.gradients, _flatten_rows(x).t(), self.recipe.activations
        )

    def _multiply(self, a_MI: Tensor, form: Format, b_OI: Tensor, grain: Grain) -> Tensor:
        """Return A Bᵀ (M, O) in the compute dtype; zeros if M, I or O is 0, as on a rank with an empty shard.

        form: float8 format of A; grain: granularity of the scales of B
        """
        (m, k), n = a_MI.shape, b_OI.shape[0]
        if not m or not n or not k:
            return a_MI.new_zeros(m, n, dtype=self.compute_dtype)
        arguments = (a_MI.to(self.compute_dtype), form.name, self.recipe.activations.name, b_OI.to(self.compute_dtype))
        whole = torch.compiler.is_compiling() and a_MI.is_cuda  # Triton kernels are faster than compiled operators
        return (torch.ops.gangline.float8_matmul if whole else multiply_rounded)(*arguments, grain.name)


def multiply_rounded(a_MI: Tensor, form: str, a_grain: str, b_OI: Tensor, b_grain: str) -> Tensor:
    """Return A Bᵀ (M, O) in the dtype of A, after quantisation of A to the float8 format `form` and of B to e4m3."""
    a = quantise(a_MI, Format[form], Grain[a_grain])
    b = quantise(b_OI, Format.E4M3, Grain[b_grain])
    return multiply(a, b, a_MI.dtype)[: len(a_MI), : len(b_OI)].contiguous()


# One operator for torch.compile, which can trace neither the choice of kernels nor, before torch 2.13, the matmul.
torch.library.custom_op("gangline::float8_matmul", multiply_rounded, mutates_args=()).register_fake(
    lambda a_MI, form, a_grain, b_OI, b_grain: a_MI.new_empty(a_MI.shape[0], b_OI.shape[0])
)


class _Linear(torch.autograd.Function):
    """Autograd function x (.., in), W (out, in), b (out,) -> x Wᵀ + b.

    Saves W and, if W is trained, x, both unquantised.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None, precision: Fp8Precision) -> Tensor:
        ctx.save_for_backward(w, *([x] if ctx.needs_input_grad[1] else []))
        ctx.precision, ctx.dtype = precision, x.dtype
        y = precision.compute_matmul(x, w)
        return y if b is None else y + b.to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        w, *inputs = ctx.saved_tensors
        need_x, need_w, need_b, _ = ctx.needs_input_grad
        precision: Fp8Precision = ctx.precision
        dx = precision.compute_grad_x(dy, w).to(ctx.dtype) if need_x else None
        dw = precision.compute_grad_w(dy, inputs[0]) if need_w else None
        return dx, dw, _flatten_rows(dy).sum(0) if need_b else None, None


def _flatten_rows(x: Tensor) -> Tensor:
    """Return a tensor (.., F) as rows (N, F)."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _restore_shape(y_NF: Tensor, x: Tensor) -> Tensor:
    """Return (N, F) as (.., F) with the leading dims of x: not a view to autograd, so in-place changes are allowed."""
    return torch.ops.aten._unsafe_view(y_NF, (*x.shape[:-1], y_NF.shape[1]))


def build(config: Fp8, run: Run) -> Fp8Precision:
    """Return the precision `fp8`. Raises UserError if the GPU does not support float8 matmuls with this scaling."""
    refuse(config.scaling, run.job.device)
    return Fp8Precision(RECIPES[config.scaling])
