"""An axis of size 1: nothing crosses it, so every call is local and touches no process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from gangline.comm.base import Comm, Pending, Reduction

T = TypeVar("T")


@dataclass(frozen=True)
class Done(Generic[T]):
    """A `Pending` that has nothing to wait for."""

    result: T

    def wait(self) -> T:
        return self.result


class Solo(Comm):
    """The one rank of an axis. Results may share memory with the input."""

    size = 1
    index = 0

    def __init__(self, axis: str, rank: int = 0) -> None:
        self.axis, self.ranks = axis, (rank,)

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum", async_: bool = False) -> torch.Tensor | Pending:
        return Done(x) if async_ else x

    def all_gather(
        self, x: torch.Tensor, async_: bool = False, into: torch.Tensor | None = None
    ) -> torch.Tensor | Pending:
        out = x if into is None else into.copy_(x)
        return Done(out) if async_ else out

    def reduce_scatter(self, x: torch.Tensor, async_: bool = False) -> torch.Tensor | Pending:
        return Done(x) if async_ else x

    def all_to_all(
        self,
        x: torch.Tensor,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_: bool = False,
    ) -> torch.Tensor | Pending:
        return Done(x) if async_ else x

    def _broadcast(self, x: torch.Tensor, source: int, background: bool) -> Pending[torch.Tensor]:
        return Done(x)

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        async_: bool = False,
    ) -> Sequence[torch.Tensor] | Pending:
        copy_own(sends, recvs, 0)
        received = [into for into, _ in recvs]
        return Done(received) if async_ else received

    def barrier(self) -> None:
        return None


def copy_own(sends: Sequence[tuple[torch.Tensor, int]], recvs: Sequence[tuple[torch.Tensor, int]], index: int) -> None:
    """Serve the transfers of rank `index` to itself, first send to first receive (gloo cannot send to itself)."""
    mine = [x for x, peer in sends if peer == index]
    own = [x for x, peer in recvs if peer == index]
    for into, x in zip(own, mine, strict=True):
        into.copy_(x)
