"""Wrapping a Comm: whatever counts, records, orders or delays traffic derives from `Wrapped`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gangline.comm.base import Comm, Comms, Pending, Reduction
from gangline.plan import Fold


class Wrapped(Comm):
    """Passes every call on to `inner`; override what should be different."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.axis, self.size, self.index, self.ranks = inner.axis, inner.size, inner.index, inner.ranks

    def all_reduce(self, x: torch.Tensor, op: Reduction = "sum", async_: bool = False) -> torch.Tensor | Pending:
        return self.inner.all_reduce(x, op, async_)

    def all_gather(
        self, x: torch.Tensor, async_: bool = False, into: torch.Tensor | None = None
    ) -> torch.Tensor | Pending:
        return self.inner.all_gather(x, async_, into)

    def reduce_scatter(self, x: torch.Tensor, async_: bool = False) -> torch.Tensor | Pending:
        return self.inner.reduce_scatter(x, async_)

    def all_to_all(
        self,
        x: torch.Tensor,
        in_splits: Sequence[int] | None = None,
        out_splits: Sequence[int] | None = None,
        async_: bool = False,
    ) -> torch.Tensor | Pending:
        return self.inner.all_to_all(x, in_splits, out_splits, async_)

    def _broadcast(self, x: torch.Tensor, source: int, background: bool) -> Pending[torch.Tensor]:
        return self.inner._broadcast(x, source, background)

    def exchange(
        self,
        sends: Sequence[tuple[torch.Tensor, int]],
        recvs: Sequence[tuple[torch.Tensor, int]],
        async_: bool = False,
    ) -> Sequence[torch.Tensor] | Pending:
        return self.inner.exchange(sends, recvs, async_)

    def barrier(self) -> None:
        self.inner.barrier()


class WrappedComms(Comms):
    """The axes of `inner`, each in a wrapper; an axis of size 1 stays as it is."""

    def __init__(self, inner: Comms, wrap: Callable[[Comm], Comm]) -> None:
        self.inner, self.wrap = inner, wrap
        self.store, self.rank, self.device = inner.store, inner.rank, inner.device
        self._wrapped: dict[int, Comm] = {}

    def _of(self, comm: Comm) -> Comm:
        if comm.size == 1:
            return comm
        if id(comm) not in self._wrapped:
            self._wrapped[id(comm)] = self.wrap(comm)
        return self._wrapped[id(comm)]

    def axis(self, *axes: str) -> Comm:
        return self._of(self.inner.axis(*axes))

    def fold(self, fold: Fold) -> Comm:
        return self._of(self.inner.fold(fold))

    def fold_rest(self, fold: Fold) -> Comm:
        return self._of(self.inner.fold_rest(fold))

    def close(self) -> None:
        self.inner.close()
