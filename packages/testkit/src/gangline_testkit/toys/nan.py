"""Toy health check for steps that are not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gangline.config.schema import Run
from gangline.health import Action, HealthCheck, Verdict
from gangline.record import StepRecord
from gangline_testkit.toys.plugin import Nan


class NanCheck(HealthCheck):
    """Health check that skips steps that are not finite, and stops the run after `patience` consecutive ones."""

    def __init__(self, config: Nan, run: Run) -> None:
        self.patience, self.row = config.patience, 0

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        self.row = 0 if record.finite else self.row + 1
        if self.row:
            action = Action.SKIP if self.row < self.patience else Action.STOP
            evidence = f"loss {record.loss}, gradient norm {record.grad_norm}, consecutive nonfinite steps: {self.row}"
            yield Verdict("not-finite", f"step {record.step}", 1.0, evidence, action, overrides=("not-finite",))

    def state(self) -> dict[str, Any]:
        return {"row": self.row}

    def load_state(self, state: dict[str, Any]) -> None:
        self.row = int(state.get("row", 0))
