"""Progress of a calibration: the first rank prints a line per measurement for the command. Torch-free."""

from __future__ import annotations

import time
from typing import TypeVar

MARK = "calibrate: "  # prefix of progress lines in the output of the ranks
Found = TypeVar("Found")


class RoundProgress:
    """Progress in a round of measurements. part: name of the round, such as "round 1 of 3"; says: whether to print."""

    def __init__(self, part: str, says: bool) -> None:
        self.part, self.says, self._since = part, says, time.perf_counter()

    def __call__(self, what: str, found: Found) -> Found:
        """Return the measurement `found`, and print how long it took: the seconds since the last call."""
        now = time.perf_counter()
        if self.says:
            print(f"{MARK}{self.part}, {what}: {now - self._since:.1f} s", flush=True)
        self._since = now
        return found
