"""Probes of a machine: memory, disk, file descriptors. A probe may be slow, hang or fail.

A probe is a function that returns the defects it finds. It runs in a separate thread, so that training never waits for
a driver. If a probe raises, or does not return within its deadline, its result is unknown.
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
    """Defect found by a probe. `key` identifies the defect (GPU, link, kind) while numbers in `text` change."""

    key: str
    text: str


Findings = list[Finding]
UNASKED = "not probed yet"


class Probe:
    """Probe with its latest result: `findings`, or None if the result is unknown, with the reason in `why`."""

    def __init__(self, name: str, ask: Callable[[], Findings], every: float, deadline: float) -> None:
        self.name, self.ask, self.every, self.deadline = name, ask, every, deadline
        self.findings: Findings | None = None
        self.why = UNASKED
        self._thread: threading.Thread | None = None
        self._begun = -1e9
        self._answer: tuple[Findings | None, str] | None = None

    def poll(self) -> None:
        """Update `findings` if the probe has returned, and start the probe again when it is due. Returns at once."""
        now = time.monotonic()
        if self._answer is not None:
            (self.findings, self.why), self._answer, self._thread = self._answer, None, None
        elif self._thread is not None and now - self._begun > self.deadline:
            self.findings, self.why = None, f"no answer within {self.deadline:g} s"
        if self._thread is None and now - self._begun >= self.every:  # a probe that hangs is not started again
            self._begun, self._thread = now, threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def _work(self) -> None:
        try:
            self._answer = self.ask(), ""
        except Exception as error:  # such as a missing driver, module or permission
            self._answer = None, f"{type(error).__name__}: {error}"


def check_memory(least: float) -> Findings:
    """Return a finding if the available share of the machine's memory is below `least`, else []."""
    with open("/proc/meminfo") as file:
        kilobytes = {line.split(":")[0]: int(line.split()[1]) for line in file if line.split()[1].isdigit()}
    free = kilobytes["MemAvailable"] / kilobytes["MemTotal"]
    return [Finding("memory", f"{free:.1%} of the machine's memory is available")] if free < least else []


def check_disk(path: str, least: float) -> Findings:
    """Return a finding if the free share of the disk that holds `path` is below `least`, else []."""
    usage = shutil.disk_usage(path)
    free = usage.free / usage.total
    text = f"{free:.1%} of the disk of {path} is free, {usage.free / 2**30:.1f} GiB"
    return [Finding("disk", text)] if free < least else []


def check_descriptors(most: float) -> Findings:
    """Return a finding if the open share of this process's file descriptors is above `most`, else []."""
    limit, count = resource.getrlimit(resource.RLIMIT_NOFILE)[0], len(os.listdir("/proc/self/fd"))
    text = f"{count} of {limit} file descriptors are open"
    return [Finding("descriptors", text)] if count > most * limit else []
