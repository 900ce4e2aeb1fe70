"""Where a run's records go: what a tracker imports. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.record import StepRecord as StepRecord, numbers as numbers, read_records as read_records
    from gangline.track.base import Start as Start, Tracker as Tracker

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.track.base": "Start Tracker",
        "gangline.record": "StepRecord numbers read_records",
    },
)
