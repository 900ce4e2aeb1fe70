"""The gated feed-forward layer: SwiGLU, GEGLU (Shazeer, arXiv 2002.05202, section 2)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from gangline.model.build import construct
from gangline.model.tree import FeedForwardNode

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu_tanh": partial(F.gelu, approximate="tanh")}


class FeedForward(nn.Module):
    """x (..., D) -> W_down (activation(W_gate x) · W_up x), (..., D)."""

    def __init__(self, node: FeedForwardNode) -> None:
        super().__init__()
        self.w_gate, self.w_up = construct(node.w_gate), construct(node.w_up)
        self.w_down, self.activation = construct(node.w_down), ACTIVATIONS[node.activation]

    def forward(self, x: Tensor) -> Tensor:
        return self.w_down(self.activation(self.w_gate(x)) * self.w_up(x))
