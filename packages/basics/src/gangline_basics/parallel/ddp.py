"""Data parallelism: the whole model on every rank, gradients added over the ranks."""

from __future__ import annotations

from torch import Tensor

from gangline.runtime import Job
from gangline_basics.parallel.buckets import Buckets
from gangline_basics.parallel.config import Ddp
from gangline_basics.parallel.whole_runtime import WholeRuntime


class DdpRuntime(WholeRuntime):
    """Adds each bucket of gradients over the ranks while the last microbatch's backward pass goes on."""

    def __init__(self, config: Ddp, job: Job) -> None:
        super().__init__(job)
        self._buckets = Buckets(
            [self.storage.used[name] for name in self.storage.trained],
            self.comm,
            int(config.bucket_mb * 2**20),
            self.precision.grad_dtype,
            self.precision.reduce_dtype,
        )

    def _before_backward(self, microbatch: int, last: int) -> None:
        if microbatch == last:
            self._buckets.begin_last()

    def _reduced(self) -> list[Tensor]:
        self._buckets.finish()
        return self.storage.assign_gradients()


def build(config: Ddp, job: Job) -> DdpRuntime:
    """The strategy `ddp`."""
    return DdpRuntime(config, job)
