"""MoE layer: route, dispatch, compute, combine."""

from __future__ import annotations

from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline.model.build import construct
from gangline.model.forward_context import emit_metric
from gangline.model.untraced import untraced
from gangline_moe.balance import apply_balance
from gangline_moe.dispatch.dispatcher import TokenDispatcher
from gangline_moe.dispatch.permute import Combine, Permutation, Permute, drop_over_capacity, sort_by_expert
from gangline_moe.nodes import MoeNode
from gangline_moe.routers.base import Choice

# Untraced: torch.compile would compile each layer apart, because the split sizes of a transfer are its constants.
_start, _dispatch = untraced(TokenDispatcher), untraced(TokenDispatcher.dispatch)
_combine = untraced(TokenDispatcher.combine)


class MoeLayer(nn.Module):
    """MoE layer: x (B, T, D) -> Σ over the token's experts of weight · expert(x), plus (gated) shared(x); (B, T, D).

    With R expert-parallel ranks, each rank holds E/R experts, and rows are sent to the experts' ranks and back; the
    shared experts are computed during the transfer.
    """

    def __init__(self, node: MoeNode) -> None:
        super().__init__()
        self.router = construct(node.router)
        self.experts = construct(node.experts)
        self.shared = None if node.shared is None else construct(node.shared)
        self.shared_gate = None if node.shared_gate is None else construct(node.shared_gate)
        self.node = node
        self.axis: Comm | None = None

    def bind(self, axis: Comm) -> None:
        """Set the communicator of the ranks over which the experts are sharded."""
        self.axis = axis

    def forward(self, x_BTD: Tensor) -> Tensor:
        choice: Choice = self.router(x_BTD)
        permutation, load_E = self.make_permutation(choice)
        rows_AD = Permute.apply(x_BTD.flatten(0, 1).to(self.experts.w_gate.weight.dtype), permutation)
        if self.axis is None or self.axis.size == 1:
            rows_AD = self.experts(rows_AD, permutation.bounds)
            shared_BTD = self.compute_shared(x_BTD)
        else:
            dispatcher = _start(self.axis, rows_AD, permutation.counts, self.node.ranks_per_node)
            shared_BTD = self.compute_shared(x_BTD)
            rows_AD = _combine(dispatcher, self.experts(_dispatch(dispatcher), dispatcher.route.bounds))
        y_BTD = Combine.apply(rows_AD, choice.weight_Nk, permutation).view_as(x_BTD)
        if shared_BTD is not None:
            y_BTD = y_BTD + shared_BTD
        return apply_balance(y_BTD, self.router, choice, load_E)

    def compute_shared(self, x_BTD: Tensor) -> Tensor | None:
        """Return the (gated) output of the shared experts for all tokens; None if the layer has no shared experts."""
        if self.shared is None or self.shared_gate is None:
            return None if self.shared is None else self.shared(x_BTD)
        return self.shared_gate(x_BTD).sigmoid() * self.shared(x_BTD)

    def make_permutation(self, choice: Choice) -> tuple[Permutation, Tensor]:
        """Return (the pairs sorted by expert, without pairs over capacity; the load before drops, (E,))."""
        E = self.node.router.experts
        permutation = sort_by_expert(choice.expert_Nk, E, choice.whole)
        load_E = permutation.counts
        capacity = self.node.compute_capacity(choice.expert_Nk.numel())
        if capacity is not None:
            permutation = sort_by_expert(drop_over_capacity(choice.expert_Nk, E, capacity), E, whole=False)
            emit_metric("dropped", 1 - permutation.counts.sum() / load_E.sum().clamp(min=1), "mean")
        return permutation, load_E
