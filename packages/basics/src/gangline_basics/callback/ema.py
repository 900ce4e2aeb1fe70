"""Exponential moving averages of the weights (Polyak and Juditsky, SIAM J. Control Optim. 1992), bias-corrected.

With w_i the weights after the i-th applied step and d the decay, the average after step t is

    a_t = (1 - d) / (1 - d^t) · Σ_{i=1..t} d^(t-i) w_i

The initial weights do not contribute (the correction of Adam, arXiv 1412.6980, section 3). The stored array is this
a_t, updated as a_t = a_{t-1} + (1 - d) / (1 - d^t) · (w_t - a_{t-1}), so the array can be used as weights directly.
Its dtype is at least float32, and it is sharded like the parameters. Frozen parameters have no average.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from gangline.callback import Callback, allocate_like
from gangline.comm.base import Comms, Store
from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.record import StepRecord
from gangline.runtime import Runtime
from gangline.shard import Shard, name_model_array
from gangline_basics.callback.config import Ema


class Average:
    """Moving average with one decay: this rank's shards, and the number of updates."""

    def __init__(self, decay: float, runtime: Runtime, place: str, dtype: torch.dtype) -> None:
        self.decay, self.label, self.updates = decay, repr(decay), 0
        self.registry, self.shards = allocate_like(runtime, f"{place}/{self.label}", dtype)

    @torch.no_grad()
    def take(self, weights: Sequence[Tensor], exact: bool) -> None:
        """Update the average with the current weights.

        exact: round after each operation, so that every element has the same bits for any sharding (fused kernels round
        the tail of a tensor differently from the middle).
        """
        self.updates += 1
        share = (1 - self.decay) / (1 - self.decay**self.updates)
        averages = [shard.local for shard in self.shards]
        theirs = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
        if exact:
            for average, weight in zip(averages, theirs, strict=True):
                average.add_((weight - average).mul_(share))
        elif averages:
            torch._foreach_lerp_(averages, theirs, share)


class EmaCallback(Callback):
    """Callback that updates each average after every applied step, and requests validation of the averages."""

    def __init__(self, config: Ema, run: Run) -> None:
        self.config, self.exact = config, run.deterministic
        self.averages: list[Average] = []

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self._weights = [piece.tensor for parameter in runtime.parameters() for piece in parameter.pieces]
        dtypes = {
            runtime.registry[name_model_array(name)].dtype for name in runtime.names()
        }  # dtypes of all parameters, even if this rank holds none of them
        dtype = torch.float64 if "float64" in dtypes else torch.float32
        self.averages = [Average(decay, runtime, self.place, dtype) for decay in self.config.decays]
        for average in self.averages:
            self.registry = average.registry if self.registry is None else self.registry | average.registry

    def shards(self) -> Iterable[Shard]:
        return chain.from_iterable(average.shards for average in self.averages)

    def state(self) -> dict[str, Any]:
        return {"updates": {average.label: average.updates for average in self.averages}}

    def load_state(self, state: dict[str, Any]) -> None:
        for average in self.averages:
            average.updates = int(state["updates"].get(average.label, 0))

    def after_step(self, record: StepRecord, applied: bool) -> None:
        if applied:
            for average in self.averages:
                average.take(self._weights, self.exact)

    def list_validated_weights(self) -> Sequence[str]:
        return [average.label for average in self.averages] if self.config.validate else []
