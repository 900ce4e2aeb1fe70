"""Record of collectives in a rank's pulse: group, sequence number, operation, and which one the rank is waiting for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction, Splits, Transfers
from gangline.comm.solo import Done
from gangline.comm.wrap import Wrapped
from gangline.pulse.layout import MOST_PEERS, OPERATIONS, UNKNOWN_PEERS
from gangline.pulse.write import Pulse

T = TypeVar("T")
_NUMBER = {name: number for number, name in enumerate(OPERATIONS)}


class PulsedPending(Generic[T]):
    """Handle of a collective in progress that records the wait in the pulse."""

    def __init__(self, inner: Pending[T], pulse: Pulse, row: int) -> None:
        self.inner, self.pulse, self.row = inner, pulse, row

    def wait(self) -> T:
        before = self.pulse.wait(self.row)
        result = self.inner.wait()
        self.pulse.finish(self.row, before)
        return result


def unwrap_pulse(comm: Comm) -> Comm:
    """Return the `Comm` below the pulse wrapper, whose collectives the pulse does not record."""
    inner_comm = comm
    while isinstance(inner_comm, Wrapped):
        inner_comm, wrapped = inner_comm.inner, inner_comm
        if isinstance(wrapped, Pulsed):
            return inner_comm
    return comm


class Pulsed(Wrapped):
    """Wrapper that records each collective in a pulse. A collective that raises stays recorded as in progress."""

    def __init__(self, inner: Comm, pulse: Pulse) -> None:
        super().__init__(inner)
        self.pulse, self.group = pulse, pulse.group(inner.axis, inner.ranks)

    def _note(
        self, name: str, size: int, call: Callable[[], Pending[T]], background: bool, peers: int = 0
    ) -> Pending[T]:
        pulse = self.pulse
        row = pulse.begin(self.group, _NUMBER[name], size, peers)
        before = pulse.wait(row)
        if background:  # starting a collective may also block
            pending = call()
            pulse.finish(row, before, finished=False)
            return PulsedPending(pending, pulse, row)
        result = call().wait()
        pulse.finish(row, before)
        return Done(result)

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        return self._note("all_reduce", x.nbytes, lambda: self.inner._all_reduce(x, op, background), background)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        return self._note("all_gather", x.nbytes, lambda: self.inner._all_gather(x, into, background), background)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        return self._note("reduce_scatter", x.nbytes, lambda: self.inner._reduce_scatter(x, background), background)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        call = self.inner._all_to_all
        return self._note("all_to_all", x.nbytes, lambda: call(x, in_splits, out_splits, background), background)

    def _broadcast(self, x: Tensor, source: int, background: bool) -> Pending[Tensor]:
        return self._note("broadcast", x.nbytes, lambda: self.inner._broadcast(x, source, background), background)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        others = {peer for _, peer in (*sends, *recvs)} - {self.index}
        if not others:
            return self.inner._exchange(sends, recvs, background)
        peers, size = encode_peers(others), sum(x.nbytes for x, _ in sends)
        return self._note("exchange", size, lambda: self.inner._exchange(sends, recvs, background), background, peers)

    def barrier(self) -> None:
        self._note("barrier", 0, lambda: Done(self.inner.barrier()), False)


def encode_peers(peers: Iterable[int]) -> int:
    """Return a mask with one bit per peer index; `UNKNOWN_PEERS` if an index is not below `MOST_PEERS`."""
    mask = 0
    for peer in peers:
        if peer >= MOST_PEERS:
            return UNKNOWN_PEERS
        mask |= 1 << peer
    return mask
