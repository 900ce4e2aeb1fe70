"""Base class of routers: scores, choice and load balancing. B sequences of T tokens, N = B·T, E experts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gangline.model.build import construct
from gangline.model.forward_context import draw
from gangline_moe.nodes import RouterNode


@dataclass(frozen=True)
class Choice:
    """Experts that a router chose for each token, their weights, and all scores.

    expert_Nk  int64, expert indices of each token; with whole=False, index E means no expert
    weight_Nk  weights by which the experts' outputs are multiplied
    prob_NE    scores of all experts, adding up to 1, for the balancing losses
    logits_NE  the gate's output
    """

    expert_Nk: Tensor
    weight_Nk: Tensor
    prob_NE: Tensor
    logits_NE: Tensor
    whole: bool = True


def divide_by_sum(weight_Nk: Tensor, least: float = 0.0) -> Tensor:
    """Return the weights divided by their sum plus `least`.

    The weight of a single expert is exactly 1 and its gradient exactly 0. The gradient of w / w would be a rounding
    error, which differs between layouts, and SOAP would compute its first basis from it.
    """
    if weight_Nk.shape[-1] == 1:
        return weight_Nk * 0 + 1
    return weight_Nk / (weight_Nk.sum(-1, keepdim=True) + least)


class Router(nn.Module, ABC):
    """Router: x (B, T, D) -> Choice, in the dtype of the gate's weight: float32, or float64 in a float64 run.

    bias   (E,) float32, added to the scores for the choice of experts, not to weights; updated by `after_step`
    share  (E,) float32, each expert's share of the previous step's load
    """

    bias: Tensor | None
    share: Tensor | None

    def __init__(self, node: RouterNode) -> None:
        super().__init__()
        self.gate = construct(node.gate)
        self.node = node
        self.register_buffer("bias", torch.empty(node.experts, dtype=torch.float32) if node.bias_rate else None)
        self.register_buffer("share", torch.empty(node.experts, dtype=torch.float32) if node.global_aux_loss else None)

    def forward(self, x_BTD: Tensor) -> Choice:
        x_BTD = x_BTD.to(self.gate.weight.dtype)
        if self.training and self.node.jitter:
            x_BTD = x_BTD * (1 + self.node.jitter * (2 * draw(x_BTD, "jitter").to(x_BTD.dtype) - 1))
        return self.choose(self.gate(x_BTD).flatten(0, 1))

    @abstractmethod
    def choose(self, logits_NE: Tensor) -> Choice:
        """Choose the experts of each token."""

    def choose_top_k(self, score_NE: Tensor) -> Tensor:
        """Return the `top_k` experts of each token with the largest score plus bias, (N, k)."""
        return self.add_bias(score_NE).topk(self.node.top_k, dim=-1).indices

    def add_bias(self, score_NE: Tensor) -> Tensor:
        """Return the detached scores plus the bias, by which experts are chosen."""
        return score_NE.detach() if self.bias is None else score_NE.detach() + self.bias

    @torch.no_grad()
    def after_step(self, totals: dict[str, Tensor]) -> None:
        """Update the bias and the load shares from the step's total load, `totals["load"]`, (E,)."""
        load = totals.get("load")
        if load is None:
            return
        if self.bias is not None:
            self.bias += self.node.bias_rate * torch.sign(load.mean() - load).to(self.bias)
        if self.share is not None:
            self.share.copy_(load / load.sum())
