"""What is broken at the moment on this rank: set by the check at a step's begin, read by what traffic goes through."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Broken:
    """The faults that come through traffic, each until it has happened."""

    hang: bool = False
    exception: bool = False
    nan: bool = False
    miscompute: bool = False
    slow_until: int = 0  # the last step that is slow
    slow_from: int = 0  # the step in which it was slow last
    step: int = 0
    store_until: float = 0.0  # on the monotonic clock


now = Broken()
