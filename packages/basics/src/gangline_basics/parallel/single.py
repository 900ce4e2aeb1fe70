"""One process: the reference for every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.runtime import Job
from gangline_basics.parallel.config import Single
from gangline_basics.parallel.whole_runtime import WholeRuntime


class SingleRuntime(WholeRuntime):
    """Runtime of one process. It sums microbatches in order; with `groups`, it sums each group first, like a data rank.

    Group g is the g-th contiguous share of the microbatches. Under `run.deterministic` a `ddp` run with `groups` ranks
    has the same bits: it also sums the ranks' gradients in rank order.
    """

    _sums: list[Tensor] | None = None  # gradient sums of finished groups, in `reduce_dtype`

    def _begin_backward(self, microbatch: int, last: int) -> None:
        share = (last + 1) // self.groups
        if microbatch and microbatch % share == 0:
            self._end_group()

    def _end_group(self) -> None:
        wire = [gradient.to(self.precision.reduce_dtype) for gradient in self.storage.assign_gradients()]
        if self._sums is None:
            self._sums = wire
        else:
            torch._foreach_add_(self._sums, wire)
        self.storage.clear_gradients()

    def _reduce(self) -> list[Tensor]:
        gradients = self.storage.assign_gradients()
        if self._sums is not None:
            self._end_group()
            torch._foreach_copy_(gradients, self._sums)
            for name, gradient in zip(self.storage.trained, gradients, strict=True):
                self.storage.used[name].grad = gradient
            self._sums = None
            self.storage.assign_gradients()
        return gradients


def build(config: Single, job: Job) -> SingleRuntime:
    """Return the strategy `single`."""
    return SingleRuntime(job, config.groups)
