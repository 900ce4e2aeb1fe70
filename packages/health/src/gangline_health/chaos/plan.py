"""Which faults come when, on which rank: drawn from a seed, or listed. Torch-free, pure.

What was done is remembered in the run directory: a run that is started again goes on behind it.
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
# What a run survives by itself with the same losses: no kill of those who would start it again, no changed numbers.
ANYWHERE = ("kill", "stop", "slow", "hang", "exception")
APART = 5  # steps that a run must have done since it was started, before the next fault comes


@dataclass(frozen=True)
class Fault:
    """One fault. Either `step` or `second` (since the run's begin) says when; no rank: drawn when it comes."""

    number: int
    kind: str
    rank: int
    step: int | None = None
    second: float | None = None

    def is_due(self, step: int, seconds: float) -> bool:
        """Whether it is time, at the begin of step `step`, `seconds` after the run began."""
        return step >= self.step if self.step is not None else seconds >= (self.second or 0.0)


def parse(words: str) -> tuple[str, int, int | None]:
    """ "kill@100:1" -> (kind, step, rank or None). Raises ValueError."""
    match = re.fullmatch(r"([a-z-]+)@(\d+)(?::(\d+))?", words)
    if match is None or match[1] not in KINDS:
        raise ValueError(f"{words!r} is no fault: write kind@step or kind@step:rank")
    return match[1], int(match[2]), None if match[3] is None else int(match[3])


def plan(faults: int, seconds: float, seed: int, kinds: list[str], at: list[str]) -> list[Fault]:
    """Every fault, in the order in which they come; the same for the same words, whatever the layout.

    The rank is a large number, of which the rest by the number of ranks counts: so it is right for any world.
    """
    draw = random.Random(f"gangline-chaos-{seed}")
    moments = sorted(draw.uniform(0.0, seconds) for _ in range(faults))
    schedule = [Fault(n, draw.choice(kinds), draw.randrange(1 << 30), second=at) for n, at in enumerate(moments)]
    for number, words in enumerate(at, faults):
        kind, step, rank = parse(words)
        schedule.append(Fault(number, kind, draw.randrange(1 << 30) if rank is None else rank, step=step))
    return schedule


class FaultsDone:
    """What has been done of a plan, in files of the run directory: each fault once, whoever comes first."""

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
        """Whether this process is the one that does it; known to all from then on, also after a kill."""
        try:
            handle = os.open(self.folder / str(fault.number), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.close(handle)
        return True
