"""Token dispatch to the ranks that hold the experts, and back: two all-to-alls with uneven splits.

Rows are sorted by expert, and a rank holds consecutive experts, so the rows for a rank are contiguous. Arrived rows are
sorted by source rank, then regrouped by expert, with source ranks in order. Each expert's rows then have the same order
as in one process with all ranks' tokens, and the same bits. (On a CPU the bits are equal only if the widths are
multiples of 32: otherwise another loop computes the last row of an activation.)

E experts, D model width. A rows leave this rank, a rows arrive for the experts on this rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gangline.comm.base import Comm, Pending
from gangline.model.forward_context import overlap_point
from gangline_moe.dispatch.all_to_all import AllToAll, FlatAllToAll
from gangline_moe.dispatch.hierarchical import HierarchicalAllToAll
from gangline_moe.dispatch.per_expert import PerExpertAllToAll

FEW = 8  # number of experts per rank up to which each expert's rows are a separate message, on a CPU


@dataclass
class Route:
    """Route of one microbatch's rows over the expert-parallel ranks.

    order_a  permutation that sorts the arrived rows by expert; None: rows arrive sorted
    bounds   (experts on this rank + 1,): the rows of local expert e are bounds[e] to bounds[e + 1]
    """

    transfer: AllToAll
    order_a: Tensor | None
    bounds: Tensor


def plan_route(comm: Comm, rows: int, counts_E: Tensor, ranks_per_node: int | None = None) -> Route:
    """Exchange the row counts of each expert and plan the transfer: one small all-to-all, one host synchronisation.

    rows: the number A of rows; counts_E: number of rows per expert. On a CPU with 2 to FEW experts per rank, each
    expert's rows are one message, which saves the regrouping (measured with gloo, 16 MiB per rank: see
    `benchmarks/moe.py dispatch`).
    """
    here = len(counts_E) // comm.size
    arriving_E = comm.all_to_all(counts_E.contiguous())
    by_rank = torch.stack((counts_E.view(comm.size, here), arriving_E.view(comm.size, here)))
    hierarchical = ranks_per_node is not None and 1 < ranks_per_node < comm.size
    if counts_E.device.type == "cpu" and 1 < here <= FEW and not hierarchical:
        per_expert = PerExpertAllToAll(comm, *by_rank.tolist())
        return Route(per_expert, None, per_expert.bounds)
    if counts_E.is_meta:  # on the meta device: assume equally many rows per rank
        sent = received = [rows // comm.size] * comm.size
    else:
        sent, received = by_rank.sum(-1).tolist()
    of_expert = by_rank[1].sum(0)
    bounds = torch.cat((of_expert.new_zeros(1), of_expert.cumsum(0)))
    order_a = None
    if here > 1:
        expert_a = torch.arange(here, device=counts_E.device).repeat(comm.size)
        expert_a = expert_a.repeat_interleave(by_rank[1].reshape(-1), output_size=sum(received))
        order_a = torch.argsort(expert_a, stable=True)
    if hierarchical and not counts_E.is_meta:
        assert ranks_per_node is not None
        return Route(HierarchicalAllToAll.from_sent(comm, sent, ranks_per_node, counts_E.device), order_a, bounds)
    return Route(FlatAllToAll(comm, sent, received), order_a, bounds)


@dataclass
class _Transfer:
    """One transfer: `start` in the forward pass, `start_back` in the backward pass; `pending`: the result in flight."""

    start: Callable[[Tensor], Pending[Tensor]]
    start_back: Callable[[Tensor], Pending[Tensor]]
    pending: Pending[Tensor] | None = field(default=None, repr=False)

    def end(self) -> Tensor:
        assert self.pending is not None
        overlap_point()
        arrived, self.pending = self.pending.wait(), None
        return arrived


class _Depart(torch.autograd.Function):
    """Start a transfer; the empty output only links `_Arrive` to it in the graph. Backward waits for the gradient."""

    @staticmethod
    def forward(ctx, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.pending = transfer.start(rows.contiguous())
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor):
        return ctx.transfer.end(), None


class _Arrive(torch.autograd.Function):
    """Wait for the arriving rows. Backward starts the transfer of their gradient."""

    @staticmethod
    def forward(ctx, departed: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.end()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        ctx.transfer.pending = ctx.transfer.start_back(grad.contiguous())
        return grad.new_empty(0), None


class _Reorder(torch.autograd.Function):
    """Reorder rows -> rows[order], `order` being a permutation."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.inverse), None, None


class TokenDispatcher:
    """Both transfers of one microbatch: rows (A, D) to the ranks of their experts, and the experts' outputs back.

    The transfer starts in the constructor. Computation before `dispatch()` overlaps the transfer, and its backward
    pass overlaps the return of the gradients.
    """

    def __init__(self, comm: Comm, rows_AD: Tensor, counts_E: Tensor, ranks_per_node: int | None = None) -> None:
        self.route = plan_route(comm, len(rows_AD), counts_E, ranks_per_node)
        there = self.route.transfer
        self._outward = _Transfer(there.to_experts, there.from_experts)
        self._departed = _Depart.apply(rows_AD, self._outward)
        if self.route.order_a is not None:
            self._inverse = torch.empty_like(self.route.order_a)
            self._inverse[self.route.order_a] = torch.arange(len(self._inverse), device=self._inverse.device)

    def dispatch(self) -> Tensor:
        """Return the rows of the experts on this rank, (a, D), sorted by expert."""
        rows_aD = _Arrive.apply(self._departed, self._outward)
        order = self.route.order_a
        return rows_aD if order is None else _Reorder.apply(rows_aD, order, self._inverse)

    def combine(self, rows_aD: Tensor) -> Tensor:
        """Return the experts' outputs, (A, D), on the ranks that the rows came from and in their original order."""
        if self.route.order_a is not None:
            rows_aD = _Reorder.apply(rows_aD, self._inverse, self.route.order_a)
        there = self.route.transfer
        home = _Transfer(there.from_experts, there.to_experts)
        return _Arrive.apply(_Depart.apply(rows_aD, home), home)
