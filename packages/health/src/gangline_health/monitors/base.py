"""The contract of a monitor: a part of `health=on` that looks at one thing. Torch-free."""

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
    """Asked on every rank as a health check is (`gangline.health.HealthCheck`); each method but one may stay as it is.

    What a monitor raises names it and leaves it out from there on, at the same step on all ranks; the others go on.
    Only `collective` may use collectives: what it raises ends that start of the ranks, and the next ones of the job do
    without this monitor.

    A verdict's details that playbooks read: `first`, the step from which on something may be spoilt; `exclude`, whom it
    names for sure as the cause: a node, or one of its ranks ("rank 3"); `row`, findings in a row; `proven`, whether a
    comparison has shown that the state before `first` is good: without it a second return goes back further.
    """

    name: str  # as in health.on.<name>

    @abstractmethod
    def describe(self) -> str:
        """What it watches, in a few words, for the start of a run."""

    def explain_unknown(self) -> str:
        """Return what cannot be watched on this machine and why, in a few words; "" if all can."""
        return ""

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        """The parts of the run are built."""

    def before_run(self) -> Iterable[Verdict]:
        """Verdicts before the first step of this start."""
        return ()

    def before_step(self, step: int) -> None:
        """Step number `step` is about to begin."""

    def before_update(self, step: int, loss: float, grad_norm: float) -> Iterable[Verdict]:
        """Verdicts between clip and update, on global numbers that are finite."""
        return ()

    def collective(self, comm: Comm, step: int) -> None:
        """On all ranks, each step, before `observe`."""

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        """Verdicts on the step just done."""
        return ()

    def state(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps; equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave; {} is a fresh monitor's."""
