"""Toy callback that saves and validates a copy of the weights from before the newest step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from gangline.callback import Callback, Metrics, allocate_like
from gangline.comm.base import Comms, Store
from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.record import StepRecord
from gangline.runtime import Runtime
from gangline.shard import Shard
from gangline_testkit.toys.plugin import Previous

LABEL = "weights"


class PreviousCallback(Callback):
    """Callback that copies the weights before each step, and counts the steps that were applied."""

    def __init__(self, config: Previous, run: Run) -> None:
        self.applied = 0

    def attach(
        self, runtime: Runtime, optimizer: Optimizer, comms: Comms, store: Store | None, device: torch.device
    ) -> None:
        self.runtime = runtime
        self.registry, self.arrays = allocate_like(runtime, f"{self.place}/{LABEL}")

    def shards(self) -> Iterable[Shard]:
        return self.arrays

    def state(self) -> dict[str, Any]:
        return {"applied": self.applied}

    def load_state(self, state: dict[str, Any]) -> None:
        self.applied = int(state["applied"])

    @torch.no_grad()
    def before_step(self, step: int) -> None:
        self.fill_first_values(self.arrays, list(self.runtime.shards()))

    def after_step(self, record: StepRecord, applied: bool) -> Metrics:
        self.applied += applied
        return {"applied": float(self.applied)}

    def list_validated_weights(self) -> Sequence[str]:
        return (LABEL,)
