"""Active faults of this rank: set by the check at the begin of a step, read by its communicators and store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Broken:
    """Faults that communicators and the store apply, each until it has happened."""

    hang: bool = False
    exception: bool = False
    nan: bool = False
    miscompute: bool = False
    slow_until: int = 0  # last slow step
    slow_from: int = 0  # newest step that was slowed down
    step: int = 0
    store_until: float = 0.0  # end of the outage on the monotonic clock


now = Broken()
