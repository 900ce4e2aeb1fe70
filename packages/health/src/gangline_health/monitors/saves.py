"""Saves that come to nothing: training goes on, and every step from there on is one more that a fault would undo.

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
    """Says each reason once, until a save has come to something again."""

    name = "saves"

    def __init__(self) -> None:
        self.said: str | None = None
        self.whole: int | None = None  # the step in which a checkpoint was last heard to be whole
        self.previous: StepRecord | None = None
        self.rank = 0

    def describe(self) -> str:
        return "saves that fail"

    def attach(self, runtime: Runtime, comms: Comms, store: Store | None, device: torch.device) -> None:
        self.rank = comms.rank

    def observe(self, record: StepRecord) -> Iterable[Verdict]:
        # what became of a save is in the record only once all checks have looked at it: it is seen in the next one
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
