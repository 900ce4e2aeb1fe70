"""Monitor of failed checkpoint saves: training continues, but a fault would undo all steps since the last save.

Torch-free.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from gangline.health import Action, Verdict
from gangline_health.monitors.base import Monitor

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comms, Store
    from gangline.record import StepRecord
    from gangline.runtime import Runtime


class SavesMonitor(Monitor):
    """Monitor that reports a failed save; consecutive failures with the same reason are reported once."""

    name = "saves"

    def __init__(self) -> None:
        self.said: str | None = None
        self.whole: int | None = None  # last step whose record has a complete checkpoint
        self.previous: StepRecord | None = None
        self.rank = 0

    def describe(self) -> str:
        return "saves that fail"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.rank = comms.rank

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        # the result of a save is added to the record after checks observe it, so it is read in the next step
        previous, self.previous = self.previous, record
        if previous is None or self.rank:  # only rank 0 reports, because a save fails on all ranks at once
            return
        if previous.saved:
            self.whole = previous.step
        why = previous.failed_save
        if why is not None and why != self.said:
            newest = (
                "no complete checkpoint is known"
                if self.whole is None
                else f"newest complete checkpoint: step {self.whole}"
            )
            evidence = f"saving a checkpoint failed: {why}; {newest}"
            details = {"step": record.step, "row": 1, "why": why}
            yield Verdict("not-saved", f"step {previous.step}", 1.0, evidence, Action.WARN, details=details)
        self.said = why
