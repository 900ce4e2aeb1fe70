"""Toy strategy: local SGD (Stich, arXiv 1805.09767), with replicas that differ between averages of the weights.

Each rank trains a replica of the full model on its own samples. Every `every` steps all ranks average their weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from gangline.batch import Batch
from gangline.comm.purpose import mark_traffic
from gangline.runtime import Job, Sampling, StepResult, Stop, Written
from gangline_basics.parallel.whole_runtime import WholeRuntime
from gangline_testkit.toys.plugin import Apart


class ApartRuntime(WholeRuntime):
    """Runtime of local SGD. Replicas do not average the state of the optimizer."""

    differs = frozenset({"dp_replicate"})

    def __init__(self, config: Apart, job: Job) -> None:
        super().__init__(job)
        self.every, self.steps = config.every, 0

    def step(self, microbatches: Sequence[Batch]) -> StepResult:
        self.steps = microbatches[0].step + 1
        result = super().step(microbatches)
        bad = torch.tensor(
            [float(not result.finite)], device=self.device
        )  # whether the gradients of this replica are not finite
        return replace(result, finite=not float(self.comm.all_reduce(bad, "max")))

    def _begin_backward(self, microbatch: int, last: int) -> None:
        """Skip the gradient reduction: gradients stay on their replica."""

    def _reduce(self) -> list[Tensor]:
        gradients = self.storage.assign_gradients()
        torch._foreach_mul_(gradients, float(self.comm.size))  # the mean over the samples of this replica
        return gradients

    def clip(self, max_norm: float | None) -> float:
        """Clip each replica by its own norm, and return the largest norm on all ranks."""
        own = torch.tensor([super().clip(max_norm)], dtype=torch.float64, device=self.device)
        with mark_traffic("norm"):
            return float(self.comm.all_reduce(own, "max"))

    @torch.no_grad()
    def finish_update(self) -> None:
        super().finish_update()
        if self.steps % self.every == 0:
            with mark_traffic("weights"):
                for master in self._masters:
                    master.copy_(self.comm.all_reduce(master.detach().clone()) / self.comm.size)

    def evaluate(self, microbatches: Sequence[Batch]) -> tuple[float, int]:
        with self._use_first_weights():
            return super().evaluate(microbatches)

    def score(self, batches: Sequence[Batch], losses_per_sample: int = 1) -> Tensor:
        with self._use_first_weights():
            return super().score(batches, losses_per_sample)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, stop: Stop | None = None
    ) -> list[Written]:
        with self._use_first_weights():
            return super().generate(prompts, sampling, stop=stop)

    @contextmanager
    def _use_first_weights(self) -> Iterator[None]:
        """Copy the weights of the first replica, which checkpoints store, to every replica during the block."""
        own = [shard.local.detach().clone() for shard in self.shards()]
        with torch.no_grad():
            for shard in self.shards():
                shard.local.copy_(self.comm.broadcast(shard.local.detach().clone(), 0))
            try:
                yield
            finally:
                for shard, before in zip(self.shards(), own, strict=True):
                    shard.local.copy_(before)


def build(config: Apart, job: Job) -> ApartRuntime:
    """Return the runtime of the strategy `apart`."""
    return ApartRuntime(config, job)
