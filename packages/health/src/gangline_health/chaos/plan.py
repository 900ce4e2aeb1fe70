"""Schedule of injected faults: kind, time and rank of each fault, drawn from a seed or listed. Torch-free.

Injected faults are recorded in the run directory, so that a restarted run does not inject them again.
"""

from __future__ import annotations

import os
import random
import re
import time
from dataclasses import dataclass
from pathlib import Path

KINDS = (
    "kill", "kill-all", "kill-agent", "stop", "slow", "hang", "exception", "nan", "bit-flip", "gradient-flip",
    "miscompute", "bad-restore", "bad-batch", "disk-full", "lost-store",
)  # fmt: skip
# Kinds of faults that a run survives with unchanged losses: they do not kill the launcher or change numbers.
ANYWHERE = ("kill", "stop", "slow", "hang", "exception")
IN_COLLECTIVES = ("slow", "hang", "exception", "nan", "miscompute")  # act in collectives of forward and backward
APART = 5  # minimum number of steps from a start, or from a random fault, to the next random fault of the rank


@dataclass(frozen=True)
class Fault:
    """Fault due at `step`, or `second` seconds after the run began; `rank` is taken modulo the number of ranks."""

    number: int
    kind: str
    rank: int
    step: int | None = None
    second: float | None = None

    def is_due(self, step: int, seconds: float) -> bool:
        """Return whether the fault is due when step `step` begins, `seconds` after the run began."""
        return step >= self.step if self.step is not None else seconds >= (self.second or 0.0)


def parse(words: str) -> tuple[str, int, int | None]:
    """Return (kind, step, rank or None) of a fault written as "kill@100:1". Raises ValueError if it is malformed."""
    match = re.fullmatch(r"([a-z-]+)@(\d+)(?::(\d+))?", words)
    if match is None or match[1] not in KINDS:
        raise ValueError(f"{words!r} is not a fault: write kind@step or kind@step:rank")
    return match[1], int(match[2]), None if match[3] is None else int(match[3])


def plan(faults: int, seconds: float, seed: int, kinds: list[str], at: list[str]) -> list[Fault]:
    """Return all faults: random faults by time, then the faults listed in `at`. Equal arguments give equal faults.

    A random rank is a large number, to be taken modulo the number of ranks, so it is valid for any world size.
    """
    draw = random.Random(f"gangline-chaos-{seed}")
    moments = sorted(draw.uniform(0.0, seconds) for _ in range(faults))
    schedule = [Fault(n, draw.choice(kinds), draw.randrange(1 << 30), second=at) for n, at in enumerate(moments)]
    for number, words in enumerate(at, faults):
        kind, step, rank = parse(words)
        schedule.append(Fault(number, kind, draw.randrange(1 << 30) if rank is None else rank, step=step))
    return schedule


class FaultsDone:
    """Record of injected faults in the run directory, with a file per fault.

    The process that creates the file of a fault injects the fault.
    """

    def __init__(self, run_dir: str | Path) -> None:
        self.folder = Path(run_dir, "logs", "chaos")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._made: set[int] = set()
        began = self.folder / "began"
        try:
            with began.open("x", encoding="utf-8") as file:
                file.write(repr(time.time()))
        except FileExistsError:
            pass
        self.began = began.stat().st_mtime

    def __contains__(self, fault: Fault) -> bool:
        if fault.number not in self._made and (self.folder / str(fault.number)).exists():
            self._made.add(fault.number)
        return fault.number in self._made

    def claim(self, fault: Fault) -> bool:
        """Claim the fault; return whether this process is the first to claim it. The claim outlives the process."""
        try:
            handle = os.open(self.folder / str(fault.number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.close(handle)
        return True
