"""Contract of a monitor: a part of `health=monitors` that watches one thing. Torch-free."""

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

    Each method but `describe` has a default. A monitor that raises is named and left out from then on, at the same step
    on all ranks; the other monitors continue. Only `collective` may use collectives: an exception there ends that start
    of the ranks, and the next starts of the job do without this monitor.

    Playbooks read these details of a verdict: `first`, the first step whose state may be damaged; `exclude`, a cause
    named for sure: a node, or one of its ranks ("rank 3"); `row`, the number of verdicts in a row; `proven`, whether a
    comparison has shown that the state before `first` is good: without it, a second return goes back further.
    """

    name: str  # as in health.monitors.<name>

    @abstractmethod
    def describe(self) -> str:
        """Return what it watches, in a few words, for the start of a run."""

    def explain_unknown(self) -> str:
        """Return what cannot be watched on this machine and why, in a few words; "" if all can."""
        return ""

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        """Take the parts of the run, which have been built."""

    def before_run(self) -> Iterable[Verdict]:
        """Return verdicts before the first step of this start."""
        return ()

    def before_step(self, step: int) -> None:
        """Prepare for step number `step`, which is about to begin."""

    def before_update(self, step: int, loss: float, grad_norm: float) -> Iterable[Verdict]:
        """Return verdicts between clip and update, from global numbers that are finite."""
        return ()

    def collective(self, comm: Comm, step: int) -> None:
        """Run the collectives of this monitor: called on all ranks in each step, before `observe`."""

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        """Return verdicts on the step just done."""
        return ()

    def state(self) -> dict[str, Any]:
        """Return JSON for a checkpoint to keep; equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what `state` returned; {} resets the monitor."""
