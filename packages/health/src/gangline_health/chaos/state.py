"""Active faults of this rank: set by `ChaosCheck` before a step, read by the wrapped communicators and store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Broken:
    """Active faults that the wrapped communicators and store inject. A flag is reset when its fault is injected."""

    hang: bool = False
    exception: bool = False
    nan: bool = False
    miscompute: bool = False
    slow_until: int = 0  # last step to delay
    slow_from: int = 0  # newest step that was delayed: a step is delayed once
    step: int = 0
    store_until: float = 0.0  # end of the outage of the store, in seconds on the monotonic clock


now = Broken()
