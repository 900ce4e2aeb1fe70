"""How far a calibration is: a line for each thing measured, from the first rank to the command. Torch-free."""

from __future__ import annotations

import time
from typing import TypeVar

MARK = "calibrate: "  # how such a line begins, among all that ranks and libraries print
Found = TypeVar("Found")


class RoundProgress:
    """What is measured within a round. part: which one it is, such as "round 1 of 3"."""

    def __init__(self, part: str, says: bool) -> None:
        self.part, self.says, self._since = part, says, time.perf_counter()

    def __call__(self, what: str, found: Found) -> Found:
        """`found`, which took the time since the last call."""
        now = time.perf_counter()
        if self.says:
            print(f"{MARK}{self.part}, {what}: {now - self._since:.1f} s", flush=True)
        self._since = now
        return found
