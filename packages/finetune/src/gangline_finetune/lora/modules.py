"""What is computed beside a linear, of I features in and O out."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch
from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline.model.build import Wrapper, construct
from gangline.model.forward_context import draw
from gangline_finetune.lora.nodes import DoraNode, DroppedLoraNode, LengthsNode, LoraNode


class Lengths(nn.Module):
    """What is added to the length of each row, (O,)."""

    def __init__(self, node: LengthsNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.out_features))


class LowRank(Wrapper, ABC):
    """x (..., I) -> what is inside + scale · B A x, (..., O). `where` says which rows are whose, in a stack."""

    lora_a: Any
    lora_b: Any

    def wrap(self, node: LoraNode) -> None:
        self.lora_a, self.lora_b, self.scale = construct(node.lora_a), construct(node.lora_b), node.scale

    def forward(self, x: Tensor, *where: Tensor) -> Tensor:
        beside = self.lora_a(self.drop_inputs(x), *where) * self.scale  # the scale is put on what is narrow
        return super().forward(x, *where) + self.lora_b(beside, *where)

    def drop_inputs(self, x: Tensor) -> Tensor:
        """What A sees of x."""
        return x


class Lora(LowRank):
    """A sees all of x."""


class DroppedLowRank(LowRank, ABC):
    """A sees only some features of x: drawn by (seed, step, sample, position, feature, path of the linear)."""

    weight: Tensor  # of what is inside
    matrix: Tensor  # what that multiplies with
    bias: Tensor | None
    tp: Comm | None = None  # the ranks that have the other parts of the weight

    def wrap(self, node: DroppedLoraNode) -> None:  # type: ignore[override]
        super().wrap(node)
        self.dropout, self.in_features, self.site = node.dropout, node.lora_a.in_features, f"lora_dropout/{node.site}"

    def bind(self, axis: Comm) -> None:
        self.tp = axis

    @property
    def row_cut(self) -> Comm | None:
        """The ranks that have the other features of x; None: they are all here."""
        return self.tp if self.tp is not None and self.weight.shape[1] < self.in_features else None

    def drop_inputs(self, x: Tensor) -> Tensor:
        if not (self.dropout and self.training):
            return x
        first = self.row_cut.index * x.shape[-1] if self.row_cut else 0
        kept = draw(x, self.site, first) >= self.dropout
        return x * (kept.to(x.dtype) / (1 - self.dropout))


class DroppedLora(DroppedLowRank):
    """Beside a linear, and nothing else."""


class Dora(DroppedLowRank):
    """x (..., I) -> m V x / |V| + bias with V = W + scale · B A, |V| the lengths of its rows and m = |W| + `lengths`.

    |V| counts as a constant in the backward pass (arXiv 2402.09353, section 4.3). Kept are differences to |W| and not
    m, so that zeros are the beginning, whoever has which part of W.
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
        """|W| and |V|, both (O,), of whole rows."""
        w = self.matrix.detach()  # of codes the values that they stand for
        v = w + self.scale * (self.lora_b.weight.to(w.dtype) @ self.lora_a.weight.to(w.dtype))
        wide = torch.promote_types(w.dtype, torch.float32)
        squares = torch.stack([x.to(wide).square().sum(1) for x in (w, v)])
        if self.row_cut:
            squares = self.row_cut.all_reduce(squares)
        before, after = squares.sqrt()
        return before, after.clamp_min(torch.finfo(wide).tiny)  # of a row of zeros nothing comes
