"""Monitor of checkpoint saves that fail: training continues, and a fault would undo every step since the last save.

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
    """Monitor that reports each reason once, until a save succeeds again."""

    name = "saves"

    def __init__(self) -> None:
        self.said: str | None = None
        self.whole: int | None = None  # step in which a complete checkpoint was last reported
        self.previous: StepRecord | None = None
        self.rank = 0

    def describe(self) -> str:
        return "saves that fail"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.rank = comms.rank

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        # a save's result is in the record only after all checks have seen it: it is read in the next step
        previous, self.previous = self.previous, record
        if previous is None or self.rank:  # a save fails on all ranks at once
            return
        if previous.saved:
            self.whole = previous.step
        why = previous.failed_save
        if why is not None and why != self.said:
            newest = "none is known to be whole" if self.whole is None else f"the newest whole one is of {self.whole}"
            evidence = f"a checkpoint could not be saved: {why}; {newest}"
            details = {"step": record.step, "row": 1, "why": why}
            yield Verdict("not-saved", f"step {previous.step}", 1.0, evidence, Action.WARN, details=details)
        self.said = why
