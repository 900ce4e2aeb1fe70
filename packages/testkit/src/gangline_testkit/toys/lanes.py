"""Toy module on a fold, as an example of a plugin's own layer.

L lanes, F features within each, D model width, N tokens (of all ranks of the fold).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline.model import forward_context
from gangline_basics.parallel.autograd import all_gather, reduce_scatter
from gangline_testkit.toys.plugin import LanesNode


class LanesModule(nn.Module):
    """Sum over lanes l of (1 + balance_l) · W_out_l silu(W_in_l x) for x (B, T, D), with jitter in training.

    On a fold of f ranks, each rank has L/f lanes. An all-gather collects the tokens of the f ranks, each rank sums its
    lanes for all tokens, and a reduce-scatter returns the sums to the ranks of the tokens.
    """

    balance: Tensor

    def __init__(self, node: LanesNode) -> None:
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(node.lanes, node.width, node.dim))
        self.w_out = nn.Parameter(torch.empty(node.lanes, node.dim, node.width))
        self.register_buffer("balance", torch.empty(node.lanes, dtype=torch.float64))
        self.penalty = node.penalty
        self.axis: Comm | None = None

    def bind(self, axis: Comm) -> None:
        """Set the Comm over the ranks of the fold. Called once, after sharding."""
        self.axis = axis

    def forward(self, x_BTD: Tensor) -> Tensor:
        own = x_BTD.flatten(0, 1)
        x_ND = own if self.axis is None else all_gather(own, self.axis)
        here = self.w_in.shape[0]
        first = 0 if self.axis is None else self.axis.index * here
        active = F.silu(torch.einsum("nd,lfd->lnf", x_ND, self.w_in.to(x_ND.dtype)))
        gain = (1 + self.balance[first : first + here]).to(x_ND.dtype)
        y_ND = torch.einsum("lnf,ldf,l->nd", active, self.w_out.to(x_ND.dtype), gain)
        y_BTD = (y_ND if self.axis is None else reduce_scatter(y_ND, self.axis)).view_as(x_BTD)
        if self.training:
            y_BTD = y_BTD * (1 + 0.1 * (forward_context.draw(y_BTD, "jitter").to(y_BTD.dtype) - 0.5))
        use = torch.zeros(len(self.balance), dtype=torch.float64)
        use[first : first + here] = (active.detach() > 0).sum((1, 2)).double().cpu()
        energy = y_BTD.square().mean(-1)
        forward_context.emit_metric(
            "use", use.to(x_BTD.device), "sum"
        )  # each rank of the fold has counts only for its own lanes
        forward_context.emit_metric("energy", energy.mean(), "mean")
        forward_context.emit_metric("peak", energy.max(), "max")
        energy_sum = (energy * forward_context.get_loss_mask(y_BTD)).sum()
        return forward_context.emit_loss(y_BTD, self.penalty * energy_sum, "penalty")

    def after_step(self, totals: dict[str, Tensor]) -> None:
        """Raise the balance of lanes that were used less than average, and reduce it for the others."""
        use = totals["use"]
        self.balance += 0.01 * torch.sign(use.mean() - use).to(self.balance)
