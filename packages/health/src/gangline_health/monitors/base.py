"""Contract of a monitor: a part of `health=monitors` that detects one kind of problem. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gangline.health import Verdict

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comm, Comms, Store
    from gangline.record import StepRecord
    from gangline.runtime import Runtime


class Monitor(ABC):
    """Part of `health=monitors`, called on every rank like a health check (`gangline.health.HealthCheck`).

    Every method except `describe` has a default. A monitor that raises is reported and removed, at the same step on all
    ranks; the other monitors continue. Only `collective` may use collectives: an exception there ends this start of the
    ranks, and later starts of the job run without this monitor.

    Playbooks read these details of a verdict: `first`, the first step whose state may be damaged; `exclude`, the cause
    if it is certain: a node, or one of its ranks ("rank 3"); `row`, the number of consecutive verdicts of this kind;
    `proven`, True if a comparison has shown that the state before `first` is good: unless it is set, a second rollback
    goes back to an older checkpoint.
    """

    name: str  # name of its options: health.monitors.<name>

    @abstractmethod
    def describe(self) -> str:
        """Return in a few words what this monitor detects, for the note at the start of a run."""

    def explain_unknown(self) -> str:
        """Return in a few words what this monitor cannot monitor on this machine, and why; "" if it can monitor all."""
        return ""

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        """Receive the built runtime, communicators, store and device of the run."""

    def before_run(self) -> Iterable[Verdict]:
        """Return verdicts before the first step of this start of the ranks."""
        return ()

    def before_step(self, step: int) -> None:
        """Prepare for step `step`, which is about to begin."""

    def before_update(self, step: int, loss: float, grad_norm: float) -> Iterable[Verdict]:
        """Return verdicts between gradient clipping and update; the global loss and gradient norm are finite."""
        return ()

    def collective(self, comm: Comm, step: int) -> None:
        """Run the collectives of this monitor. Called on all ranks in each step, before `observe`."""

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        """Return verdicts on the step that has just ended."""
        return ()

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint, as JSON values; it must be equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned; {} resets the monitor."""
