"""Sending rows to the ranks that hold their experts, and back: two all-to-alls with uneven splits.

Rows lie expert by expert, and a rank holds consecutive experts, so what goes to a rank is one run. What arrives lies
rank by rank; it is regrouped expert by expert, the order of the source ranks kept: the rows of an expert then lie as
they would in one process that has all ranks' tokens in order, and give the same bits (on a CPU where the widths are
multiples of 32: else the last row of an activation goes through another loop).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gangline.comm import Comm, Pending
from gangline.inside import give_way
from gangline_moe.by_node import by_node
from gangline_moe.direct import Direct

FEW = 8  # experts on a rank, up to which each has a message of its own

Transfer = Callable[[Tensor], Pending[Tensor]]  # rows of this rank -> the rows that arrive, under way


@dataclass
class Route:
    """How the rows of one microbatch travel over the ranks of a fold.

    forth, back  the transfer, and its reverse
    order_R      the arrived rows, expert by expert; None: they lie so already
    bounds       (experts here + 1,): where the rows of each expert begin and end
    """

    forth: Transfer
    back: Transfer
    order_R: Tensor | None
    bounds: Tensor


def route(comm: Comm, rows: int, counts_E: Tensor, ranks_per_node: int | None = None) -> Route:
    """Tell each rank how many rows of which expert come to it. One small all-to-all, one wait of the host.

    Few experts on a CPU: each expert's rows travel in a message of their own and are put where they belong, which saves
    the regrouping (measured with gloo, 16 MiB a rank: see `benchmarks/moe.py exchange`).
    """
    here = len(counts_E) // comm.size
    arriving = comm.all_to_all(counts_E.contiguous())
    by_rank = torch.stack((counts_E.view(comm.size, here), arriving.view(comm.size, here)))
    by_node_first = ranks_per_node is not None and 1 < ranks_per_node < comm.size
    if counts_E.device.type == "cpu" and 1 < here <= FEW and not by_node_first:
        to_RE, of_RE = by_rank.tolist()
        direct = Direct(comm, to_RE, of_RE)
        return Route(direct.forth, direct.back, None, direct.bounds)
    if counts_E.is_meta:  # a plan without memory: every rank gets as much
        to = of = [rows // comm.size] * comm.size
    else:
        to, of = by_rank.sum(-1).tolist()
    of_expert = by_rank[1].sum(0)
    bounds = torch.cat((of_expert.new_zeros(1), of_expert.cumsum(0)))
    order = None
    if here > 1:
        expert_R = torch.arange(here, device=counts_E.device).repeat(comm.size)
        order = torch.argsort(expert_R.repeat_interleave(by_rank[1].reshape(-1), output_size=sum(of)), stable=True)
    if by_node_first and not counts_E.is_meta:
        assert ranks_per_node is not None
        forth, back = by_node(comm, to, ranks_per_node, counts_E.device)
        return Route(forth.begin, back.begin, order, bounds)

    def forth_at_once(rows: Tensor) -> Pending[Tensor]:
        return comm.start_all_to_all(rows, to, of)

    def back_at_once(rows: Tensor) -> Pending[Tensor]:
        return comm.start_all_to_all(rows, of, to)

    return Route(forth_at_once, back_at_once, order, bounds)


@dataclass
class Flight:
    """One transfer, forth in the forward pass and back in the backward pass; `pending` is the one under way."""

    forth: Transfer
    back: Transfer
    pending: Pending[Tensor] | None = field(default=None, repr=False)

    def end(self) -> Tensor:
        assert self.pending is not None
        give_way()
        arrived, self.pending = self.pending.wait(), None
        return arrived


class Depart(torch.autograd.Function):
    """rows -> nothing but the place in the graph; the way back waits for the gradient."""

    @staticmethod
    def forward(ctx, rows_AD: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.pending = flight.forth(rows_AD.contiguous())
        return rows_AD.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx, _: Tensor):
        return ctx.flight.end(), None


class Arrive(torch.autograd.Function):
    """The rows that arrived; the way back sends their gradient off."""

    @staticmethod
    def forward(ctx, departed: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.end()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_RD: Tensor):
        ctx.flight.pending = ctx.flight.back(grad_RD.contiguous())
        return grad_RD.new_empty(0), None


class Reorder(torch.autograd.Function):
    """rows -> rows[order], `order` being a permutation."""

    @staticmethod
    def forward(ctx, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        return grad.index_select(0, ctx.inverse), None, None


class Exchange:
    """Both transfers of one microbatch. What runs between `Exchange(...)` and `arrived()` overlaps the first one, and
    on the way back the second one."""

    def __init__(self, comm: Comm, rows_AD: Tensor, counts_E: Tensor, ranks_per_node: int | None = None) -> None:
        self.route = route(comm, len(rows_AD), counts_E, ranks_per_node)
        self._forth = Flight(self.route.forth, self.route.back)
        self._departed = Depart.apply(rows_AD, self._forth)
        if self.route.order_R is not None:
            self._inverse = torch.empty_like(self.route.order_R)
            self._inverse[self.route.order_R] = torch.arange(len(self._inverse), device=self._inverse.device)

    def arrived(self) -> Tensor:
        """The rows for the experts here, expert by expert."""
        rows = Arrive.apply(self._departed, self._forth)
        order = self.route.order_R
        return rows if order is None else Reorder.apply(rows, order, self._inverse)

    def returned(self, rows_RD: Tensor) -> Tensor:
        """What the experts made of them, where the rows came from and in that order."""
        if self.route.order_R is not None:
            rows_RD = Reorder.apply(rows_RD, self._inverse, self.route.order_R)
        back = Flight(self.route.back, self.route.forth)
        return Arrive.apply(Depart.apply(rows_RD, back), back)
