"""Data parallelism: the complete model on every rank, gradients summed over the ranks by the run's reduction."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from gangline.batch import Batch
from gangline.runtime import Job, StepResult
from gangline.shard import Registry, Shard
from gangline_basics.parallel.buckets import Buckets
from gangline_basics.parallel.config import Ddp
from gangline_basics.parallel.whole_runtime import WholeRuntime


class DdpRuntime(WholeRuntime):
    """Runtime that sums each bucket of gradients over the ranks during the last microbatch's backward pass."""

    def __init__(self, config: Ddp, job: Job) -> None:
        super().__init__(job)
        self._buckets = Buckets(
            {name: self.storage.used[name] for name in self.storage.trained},
            self.comm,
            job.reduction,
            int(config.bucket_mb * 2**20),
            self.precision.grad_dtype,
            self.precision.reduce_dtype,
        )

    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        if microbatches:
            self._buckets.step = microbatches[0].step
        return super().step(microbatches)

    def local(self) -> tuple[Registry, list[Shard]]:
        return self._buckets.local(self.registry.mesh, self.rank)

    def _begin_backward(self, microbatch: int, last: int) -> None:
        if microbatch == last:
            self._buckets.begin_last()

    def _reduce(self) -> list[Tensor]:
        self._buckets.finish()
        return self.storage.assign_gradients()


def build(config: Ddp, job: Job) -> DdpRuntime:
    """Return the strategy `ddp`."""
    return DdpRuntime(config, job)
