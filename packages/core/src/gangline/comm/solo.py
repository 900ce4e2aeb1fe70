"""Communication on an axis of size 1: every call is local and uses no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from gangline.comm.base import Comm, Reduction, Splits, Transfers

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """`Pending` whose result is already available."""

    result: T

    def wait(self) -> T:
        return self.result


class Solo(Comm):
    """Comm of an axis with one rank. Results may share memory with the input."""

    size = 1
    index = 0

    def __init__(self, axis: str, rank: int = 0) -> None:
        self.axis, self.ranks = axis, (rank,)

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Done[Tensor]:
        return Done(x)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Done[Tensor]:
        return Done(x if into is None else into.copy_(x))

    def _reduce_scatter(self, x: Tensor, background: bool) -> Done[Tensor]:
        return Done(x)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Done[Tensor]:
        return Done(x)

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Done[Tensor]:
        return Done(x)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Done[Sequence[Tensor]]:
        copy_own(sends, recvs, 0)
        return Done([into for into, _ in recvs])

    def barrier(self) -> None:
        return None


def copy_own(sends: Transfers, recvs: Transfers, index: int) -> None:
    """Copy the transfers of rank `index` to itself, in order (gloo does not support a send to the own rank)."""
    own_sends = [x for x, peer in sends if peer == index]
    own = [x for x, peer in recvs if peer == index]
    for into, x in zip(own, own_sends, strict=True):
        into.copy_(x)
