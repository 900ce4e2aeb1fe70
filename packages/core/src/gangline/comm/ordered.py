"""Sums in rank order: bitwise equal to the sum of one process that adds the ranks' tensors one after another.

Backends add in the order of their algorithm (gloo's ring starts at another rank for each chunk of the buffer), so the
bits of a sum depend on the layout. Here every rank gets a slice of each other rank's tensor (all-to-all), adds the
slices in rank order, and sends the result to all ranks (all-gather): the backend adds nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction
from gangline.comm.purpose import get_purpose, mark_traffic
from gangline.comm.wrap import Wrapped

SMALL = 16384  # maximum bytes of a tensor that each rank sends in full to all peers, which saves a collective


class Later:
    """Pending result of a function `then` that runs after a transfer.

    `wait` calls `then` with the result of `pending`. `then` may use collectives, which get the same purpose;
    so all ranks must wait for their pending results in the same order.
    """

    def __init__(self, pending: Pending[Tensor], then: Callable[[Tensor], Tensor]) -> None:
        self.pending, self.then, self.purpose = pending, then, get_purpose()

    def wait(self) -> Tensor:
        """Return the result of `then`."""
        with mark_traffic(self.purpose):
            return self.then(self.pending.wait())


def sum_rows(parts: Tensor) -> Tensor:
    """Return the sum of the rows in order: (n, ...) -> (...). `Tensor.sum` guarantees no order."""
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def reduce_scatter_in_order(comm: Comm, x: Tensor, background: bool = False) -> Pending[Tensor]:
    """Start a reduce-scatter in rank order by one all-to-all: `x` (n·s, ...) -> this rank's (s, ...) of the sum."""
    own = (x.shape[0] // comm.size, *x.shape[1:])
    return Later(comm._all_to_all(x, None, None, background), lambda parts: sum_rows(parts.view(comm.size, *own)))


class Ordered(Wrapped):
    """A Comm whose `all_reduce(sum)` and `reduce_scatter` add in rank order, in the dtype of the tensor."""

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        if op != "sum" or self.size == 1:
            return self.inner._all_reduce(x, op, background)  # max and min do not round, so any order gives equal bits
        if x.numel() * x.element_size() <= SMALL:
            rows = x.reshape(1, -1).expand(self.size, -1).contiguous()
            return Later(self.inner.start_all_to_all(rows), lambda parts: x.copy_(sum_rows(parts).view_as(x)))
        flat = x.view(-1)
        padding = -flat.numel() % self.size
        rows = torch.cat((flat, flat.new_zeros(padding))) if padding else flat

        def hand_round(parts: Tensor) -> Tensor:
            whole = self.inner.all_gather(sum_rows(parts.view(self.size, -1)))
            return x.copy_(whole[: flat.numel()].view_as(x))

        return Later(self.inner.start_all_to_all(rows), hand_round)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return reduce_scatter_in_order(self.inner, x, background)
