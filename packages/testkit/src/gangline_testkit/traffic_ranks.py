"""Functions that a rank runs for the test of `mark_traffic`: a step, and the bytes sent for each purpose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gangline.comm.base import Comm, Pending, Reduction, Splits, Transfers
from gangline.comm.purpose import get_purpose
from gangline.comm.wrap import Wrapped, WrappedComms
from gangline_testkit import strategy_ranks as ranks


@dataclass
class StepTraffic:
    """Bytes that one rank sent in a step by purpose, and the size of its gradients in bytes."""

    sent: Counter[str]
    gradients: int


class CountingComm(Wrapped):
    """Comm that counts the bytes that a rank sends by purpose, assuming ring algorithms and direct messages."""

    def __init__(self, inner: Comm, sent: Counter[str]) -> None:
        super().__init__(inner)
        self.sent = sent

    def _count(self, nbytes: int, ranges: int) -> None:
        """Count the fraction `ranges` / `self.size` of `nbytes` bytes as sent."""
        self.sent[get_purpose()] += nbytes * ranges // self.size

    def _all_reduce(self, x: Tensor, op: Reduction, background: bool) -> Pending[Tensor]:
        self._count(x.nbytes, 2 * (self.size - 1))
        return super()._all_reduce(x, op, background)

    def _all_gather(self, x: Tensor, into: Tensor | None, background: bool) -> Pending[Tensor]:
        self._count(x.nbytes, self.size * (self.size - 1))
        return super()._all_gather(x, into, background)

    def _reduce_scatter(self, x: Tensor, background: bool) -> Pending[Tensor]:
        self._count(x.nbytes, self.size - 1)
        return super()._reduce_scatter(x, background)

    def _all_to_all(self, x: Tensor, in_splits: Splits, out_splits: Splits, background: bool) -> Pending[Tensor]:
        self._count(x.nbytes, self.size - 1)
        return super()._all_to_all(x, in_splits, out_splits, background)

    def _exchange(self, sends: Transfers, recvs: Transfers, background: bool) -> Pending[Sequence[Tensor]]:
        self._count(sum(x.nbytes for x, _ in sends), self.size)
        return super()._exchange(sends, recvs, background)


def count_step(job: ranks.StrategyJob) -> StepTraffic:
    """Run a step and measure its gradient norm, and return this rank's traffic."""
    traffic: Counter[str] = Counter()
    runtime = ranks.start(job, lambda comms: WrappedComms(comms, lambda comm: CountingComm(comm, traffic)))
    traffic.clear()
    stepped = ranks.run_step(runtime, job.share(0, *runtime.data_coordinate))
    return StepTraffic(traffic, sum(gradient.nbytes for _, _, gradient in stepped.held))
