"""Adapters next to a linear with I input and O output features: LoRA and DoRA."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline.model.build import Wrapper, construct
from gangline.model.forward_context import draw
from gangline.model.untraced import untraced
from gangline_finetune.lora.nodes import DoraNode, DroppedLoraNode, LengthsNode, LoraNode


class Lengths(nn.Module):
    """Trained parameter of DoRA, (O,): the norm of each row minus the norm of the base weight's row."""

    def __init__(self, node: LengthsNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.out_features))


class LowRank(Wrapper, ABC):
    """Adapted linear: x (..., I) -> linear(x) + scale · B A x, (..., O).

    `where`: for stacked linears, the bounds of the rows of x that belong to each linear.
    """

    lora_a: Any
    lora_b: Any

    def wrap(self, node: LoraNode) -> None:
        self.lora_a, self.lora_b, self.scale = construct(node.lora_a), construct(node.lora_b), node.scale

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        beside = self.lora_a(self.drop_inputs(x), *where) * self.scale  # scaled here, with only `rank` features
        return super().forward(x, *where) + self.lora_b(beside, *where)

    def drop_inputs(self, x: Tensor) -> Tensor:
        """Return the input of A: x, with dropout if any."""
        return x


class Lora(LowRank):
    """LoRA without dropout."""


class DroppedLowRank(LowRank, ABC):
    """LoRA with dropout of A's input. Random draws depend on (seed, step, sample, position, feature, linear)."""

    weight: Tensor  # weight of the wrapped linear
    matrix: Tensor  # matrix by which the wrapped linear multiplies: decoded, if codes are stored
    bias: Tensor | None
    tp: Comm | None = None  # the ranks that hold the other shards of the weight

    def wrap(self, node: DroppedLoraNode) -> None:  # type: ignore[override]
        super().wrap(node)
        self.dropout, self.in_features, self.site = node.dropout, node.lora_a.in_features, f"lora_dropout/{node.site}"

    def bind(self, axis: Comm) -> None:
        self.tp = axis

    @property
    def row_cut(self) -> Comm | None:
        """Ranks over which the features of x are sharded; None: all features are on this rank."""
        return self.tp if self.tp is not None and self.weight.shape[1] < self.in_features else None

    def drop_inputs(self, x: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return x
        return _drop(self, x)


@untraced  # torch.compile would treat the site as a constant, and compile each linear apart
def _drop(adapted: DroppedLowRank, x: Tensor) -> Tensor:
    first = adapted.row_cut.index * x.shape[-1] if adapted.row_cut else 0
    kept = draw(x, adapted.site, first) >= adapted.dropout
    return x * (kept.to(x.dtype) / (1 - adapted.dropout))


class DroppedLora(DroppedLowRank):
    """LoRA with dropout."""


class Dora(DroppedLowRank):
    """DoRA: x (..., I) -> m V x / |V| + bias with V = W + scale · B A, |V| its row norms, m = |W| + `lora_lengths`.

    The backward pass treats |V| as a constant (arXiv 2402.09353, section 4.3). The parameter is the difference m - |W|
    instead of m, so that its initial value is zero for any sharding of W.
    """

    def wrap(self, node: DoraNode) -> None:  # type: ignore[override]
        super().wrap(node)
        self.lora_lengths: Lengths = construct(node.lora_lengths)

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        y, bias = super().forward(x, *where), self.bias
        before, after = self._compute_lengths()
        m = (before + self.lora_lengths.weight) / after
        return m.to(y.dtype) * y if bias is None else m.to(y.dtype) * (y - bias) + bias

    @torch.no_grad()
    def _compute_lengths(self) -> tuple[Tensor, Tensor]:
        """Return the norms |W| and |V| of complete rows, both (O,)."""
        w = self.matrix.detach()  # decoded, if codes are stored
        v = w + self.scale * (self.lora_b.weight.to(w.dtype) @ self.lora_a.weight.to(w.dtype))
        wide = torch.promote_types(w.dtype, torch.float32)
        squares = torch.stack([x.to(wide).square().sum(1) for x in (w, v)])
        if self.row_cut:
            squares = self.row_cut.all_reduce(squares)
        before, after = squares.sqrt()
        return before, after.clamp_min(torch.finfo(wide).tiny)  # avoids division by 0 for rows of zeros
