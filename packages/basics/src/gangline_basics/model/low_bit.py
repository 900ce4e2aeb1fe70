"""Quantised frozen weights: storage as 8-bit codes with scales (`Plan.low_bit`), and matmuls with them.

    w ≈ c · s      c (out, in) int8, s (out, in / block) float32

`block` adjacent weights of a row share a scale s = max |w| / 127, and c = round(w / s), so |w - c · s| <= s / 2. It is
absmax quantisation (Dettmers et al., LLM.int8(), arXiv 2208.07339, section 2) in blocks (arXiv 2110.02861, section
2.1), like the frozen base weights of QLoRA (arXiv 2305.14314, section 2), but with 8 bits. A block is part of one row,
and no shard splits a block, so codes and scales depend on the weight alone, not on the sharding.

(R, F): rows and input features of a shard of a matrix; (R, S): the scales of its rows
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from gangline.errors import UserError
from gangline.model.build import Wrapper
from gangline.plan import Plan
from gangline.shard import Shard, name_model_array, parse_parameter
from gangline_basics.model.low_bit_node import EightBitNode

MOST = 127  # largest code of an int8, symmetric around 0


def encode(w_RF: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return (codes (R, F) int8, scales (R, S) float32). Raises ValueError if a weight is not finite."""
    w_RSB = w_RF.float().unflatten(-1, (-1, block))
    scales_RS = w_RSB.abs().amax(-1) / MOST
    if not bool(scales_RS.isfinite().all()):
        raise ValueError("a weight is not finite")
    tiny = torch.finfo(scales_RS.dtype).tiny  # the scale of a block of zeros is 0
    codes_RSB = (w_RSB / scales_RS.clamp_min(tiny).unsqueeze(-1)).round().clamp(-MOST, MOST)
    return codes_RSB.flatten(-2).to(torch.int8), scales_RS


def decode(codes_RF: Tensor, scales_RS: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the weights (R, F) for codes and scales, multiplied in float32 for every `dtype`."""
    w_RSB = codes_RF.float().unflatten(-1, (scales_RS.shape[-1], -1)) * scales_RS.float().unsqueeze(-1)
    return w_RSB.flatten(-2).to(dtype)


@torch.no_grad()
def fill_codes(shard: Shard, plan: Plan, fill: Callable[[Shard], None]) -> None:
    """Fill a shard of codes or of scales from the original weight, a shard of which `fill` fills.

    A floating-point shard of the weight is filled with the dequantised values.
    Raises UserError if a weight is not finite, ValueError if a shard splits a block.
    """
    name = plan.get_owner(parse_parameter(shard.name))
    rule = plan.find_low_bit(name)
    assert rule is not None, "the plan stores the weight in full precision"
    (row, column), (rows, columns), (height, width) = shard.offset, shard.local.shape, shard.global_shape
    if plan.is_scales(name):
        name, column, columns, width = _name_weight(name), column * rule.block, columns * rule.block, width * rule.block
    elif column % rule.block or columns % rule.block:
        raise ValueError(f"a shard of {name} at column {column} splits a block of {rule.block} codes")
    w = torch.empty(rows, columns, dtype=torch.float32, device=shard.local.device)
    fill(Shard(name_model_array(name), (height, width), w.dtype, (row, column), w))
    try:
        codes, scales = encode(w, rule.block)
    except ValueError as error:
        raise UserError(
            f"{name} cannot be stored in 8 bits: {error}.", "NaN and infinity have no 8-bit codes."
        ) from error
    if shard.local.dtype.is_floating_point and name == parse_parameter(shard.name):
        shard.local.copy_(decode(codes, scales))
    else:
        shard.local.copy_(codes if name == parse_parameter(shard.name) else scales)


def _name_weight(scales: str) -> str:
    return f"{scales.rpartition('.')[0]}.weight"


class Codes:
    """Matrix (out, in) stored as codes and scales; torch's functions receive the dequantised matrix.

    The dequantised matrix is dropped after each matmul, and recomputed in the backward pass.
    """

    requires_grad = False

    def __init__(self, codes: Tensor, scales: Tensor) -> None:
        self.codes, self.scales = codes, scales

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def dequantise(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the dequantised matrix."""
        return decode(self.codes, self.scales, dtype)

    def detach(self) -> Tensor:
        """Return the dequantised matrix, which has no autograd history."""
        return self.dequantise()

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is F.linear and not kwargs and isinstance(args[1], Codes):
            return _DequantisedMatmul.apply(args[0], args[1], args[2] if len(args) > 2 else None)
        dtype = next((arg.dtype for arg in args if isinstance(arg, Tensor)), torch.float32)
        return function(*(arg.dequantise(dtype) if isinstance(arg, Codes) else arg for arg in args), **(kwargs or {}))


class _DequantisedMatmul(torch.autograd.Function):
    """x (..., in), W (out, in), b (out,) -> x Wᵀ + b. Saves no tensors for backward: W is a parameter."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Codes, b: Tensor | None) -> Tensor:
        ctx.w = w
        return F.linear(x, w.dequantise(x.dtype), b)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        dx = dy @ ctx.w.dequantise(dy.dtype) if ctx.needs_input_grad[0] else None
        return dx, None, dy.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


class EightBitLinear(Wrapper):
    """Frozen linear whose weight is stored as codes."""

    weight: Tensor  # (out, in) int8

    def wrap(self, node: EightBitNode) -> None:
        codes = torch.empty(node.out_features, node.in_features, dtype=torch.int8)
        self.weight = nn.Parameter(codes, requires_grad=False)
        scales = torch.empty(node.out_features, node.in_features // node.block)
        self.scales = nn.Parameter(scales, requires_grad=False)

    @property
    def matrix(self) -> Codes:
        return Codes(self.weight, self.scales)
