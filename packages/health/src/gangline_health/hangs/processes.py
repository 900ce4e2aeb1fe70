"""State of a rank's process, read from /proc, and stack traces of its threads. Torch-free."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gangline.launch.guard import read_birth
from gangline.launch.output import log_path
from gangline.launch.signals import STACKS
from gangline.storage.files import open_regular
from gangline_health.pulses import Seen

TICK = os.sysconf("SC_CLK_TCK")


def read_state(pid: int) -> tuple[str, float]:
    """Return (state of the main thread, CPU seconds of the process); ("", 0.0) if the process has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[0], (int(fields[11]) + int(fields[12])) / TICK


def collect_stacks(run_dir: Path, ranks: Sequence[Seen], seconds: float = 3.0) -> dict[int, str]:
    """Return stack traces of each rank, by rank; if a rank cannot write them, its thread states from /proc."""
    logs = {pulse.rank: _ask(run_dir, pulse) for pulse in ranks}
    stacks, deadline = {}, time.monotonic() + seconds
    for pulse in ranks:
        log, size = logs[pulse.rank]
        text = ""
        while log is not None and not text.endswith("\n\n") and time.monotonic() < deadline:
            time.sleep(0.05)
            output = _read_since(log, size)
            if output and output == text:
                break
            text = output
        stacks[pulse.rank] = text or _read_thread_states(pulse.pid)
    return stacks


def kill(pulse: Seen, signum: int) -> bool:
    """Send a signal to the process that wrote a pulse, unless its pid was reused; return whether it was sent."""
    if not pulse.alive:
        return False
    with contextlib.suppress(ProcessLookupError):
        os.kill(pulse.pid, signum)
        return True
    return False


def _ask(run_dir: Path, pulse: Seen) -> tuple[Path | None, int]:
    log = log_path(run_dir / "logs", pulse.rank)
    if (
        STACKS is None
        or read_birth(pulse.pid) is None
        or read_state(pulse.pid)[0] in ("T", "")
        or not handles(pulse.pid, STACKS)
    ):
        return None, 0
    size = log.stat().st_size if log.exists() else 0
    return (log, size) if kill(pulse, STACKS) else (None, 0)


def handles(pid: int, signum: int) -> bool:
    """Return whether the process has a handler for the signal: without a handler, the signal would end the process."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        mask_line = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask_line.split()[1], 16) >> (signum - 1) & 1)
    return False


def _read_since(log: Path, size: int) -> str:
    with contextlib.suppress(OSError), open_regular(log, sys.maxsize) as file:
        file.seek(size)
        return file.read(100_000).decode(errors="replace")
    return ""


def _read_thread_states(pid: int) -> str:
    """Return a line for each thread of a process: its name, kernel wait channel, system call and state."""
    lines = []
    with contextlib.suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            words = [task.name]
            for name in ("comm", "wchan", "syscall"):
                with contextlib.suppress(OSError):
                    words.append(f"{name} {(task / name).read_text().strip()}")
            with contextlib.suppress(OSError):
                words.append("state " + (task / "stat").read_text().rpartition(")")[2].split()[0])
            lines.append("thread " + ", ".join(words))
    return "\n".join(lines)
