"""Readings of a machine: memory, disk, file descriptors. Each may be slow, hang or be impossible.

A probe is a function that gives what it finds wrong. It is asked in a thread of its own, so that
nothing that trains ever waits for a driver; what has not answered within its deadline, or raises, is unknown.
"""

from __future__ import annotations

import os
import resource
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What is wrong; `key` says of what (a GPU, a link, a kind), and stays the same while the numbers change."""

    key: str
    text: str


Findings = list[Finding]
UNASKED = "not asked yet"


class Probe:
    """One probe and what is known of it; `findings` is None while it is unknown, and `why` says why."""

    def __init__(self, name: str, ask: Callable[[], Findings], every: float, deadline: float) -> None:
        self.name, self.ask, self.every, self.deadline = name, ask, every, deadline
        self.findings: Findings | None = None
        self.why = UNASKED
        self._thread: threading.Thread | None = None
        self._begun = -1e9
        self._answer: tuple[Findings | None, str] | None = None

    def poll(self) -> None:
        """Take up an answer, and ask again where it is time; returns at once."""
        now = time.monotonic()
        if self._answer is not None:
            (self.findings, self.why), self._answer, self._thread = self._answer, None, None
        elif self._thread is not None and now - self._begun > self.deadline:
            self.findings, self.why = None, f"no answer within {self.deadline:g} s"
        if self._thread is None and now - self._begun >= self.every:  # one that hangs is not asked again
            self._begun, self._thread = now, threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            self._answer = self.ask(), ""
        except Exception as error:  # no driver, no module, no permission
            self._answer = None, f"{type(error).__name__}: {error}"


def check_memory(least: float) -> Findings:
    """Memory of the machine that can still be had, as a share of all."""
    with open("/proc/meminfo") as file:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file if line.split()[1].isdigit()}
    free = kilobytes["MemAvailable"] / kilobytes["MemTotal"]
    return [Finding("memory", f"{free:.1%} of the memory is left")] if free < least else []


def check_disk(path: str, least: float) -> Findings:
    """Room where the run writes."""
    usage = shutil.disk_usage(path)
    free = usage.free / usage.total
    text = f"{free:.1%} of the disk under {path} is left, {usage.free / 2**30:.1f} GiB"
    return [Finding("disk", text)] if free < least else []


def check_descriptors(most: float) -> Findings:
    """Open files of this process, as a share of its limit."""
    limit, count = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    text = f"{count} of {limit} file descriptors are open"
    return [Finding("descriptors", text)] if count > most * limit else []
