"""Wrappers of a Comm: code that counts, records, orders or delays traffic derives from `Wrapped`."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Sequence

from torch import Tensor

from gangline.comm.base import Comm, Comms, Pending, Reduction, Splits, Transfers
from gangline.plan import Fold


class Wrapped(Comm, ABC):
    """Comm that forwards its calls to `inner`. Override `_all_reduce` to change `all_reduce` and `start_all_reduce`."""

    def __init__(self, inner: Comm) -> None:
        self.inner = inner
        self.axis, self.size, self.index, self.ranks = inner.axis, inner.size, inner.index, inner.ranks

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        return self.inner._all_reduce(x, op, background)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        return self.inner._all_gather(x, into, background)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return self.inner._reduce_scatter(x, background)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        return self.inner._all_to_all(x, in_splits, out_splits, background)

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Pending[Tensor]:
        return self.inner._broadcast(x, source, background)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        return self.inner._exchange(sends, recvs, background)

    def barrier(self) -> None:
        self.inner.barrier()


class WrappedComms(Comms):
    """Comms that wrap the Comm of each axis of `inner`, except axes of size 1."""

    def __init__(self, inner: Comms, wrap: Callable[[Comm], Comm]) -> None:
        self.inner, self.wrap = inner, wrap
        self.store, self.rank, self.device = inner.store, inner.rank, inner.device
        self._wrapped: dict[int, Comm] = {}

    def _wrap_once(self, comm: Comm) -> Comm:
        if comm.size == 1:
            return comm
        if id(comm) not in self._wrapped:
            self._wrapped[id(comm)] = self.wrap(comm)
        return self._wrapped[id(comm)]

    def get_comm(self, *axes: str) -> Comm:
        return self._wrap_once(self.inner.get_comm(*axes))

    def fold(self, fold: Fold) -> Comm:
        return self._wrap_once(self.inner.fold(fold))

    def fold_rest(self, fold: Fold) -> Comm:
        return self._wrap_once(self.inner.fold_rest(fold))

    def close(self) -> None:
        self.inner.close()
