"""Real `train` runs of a small model on a small text, with restricted disks, and readers of their results."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from functools import cache
from pathlib import Path

from gangline_testkit import RealRuns
from gangline_testkit.real_runs import SMALL

SETTINGS = (
    *SMALL,
    "model=tiny",
    "schedule=constant",
    "track=[console,jsonl]",
    "track.console.every=1",
    "checkpoint=zarr",
)


class Runs(RealRuns):
    """Directory with a training text and runs."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SETTINGS)

    def end(self, process: subprocess.Popen[str], run_dir: str, steps: int) -> tuple[str, int]:
        """End a run by SIGTERM after `steps` more steps; return its output and its last step.

        A test that acts on an early step sets a large `run.steps`: the run cannot finish before the test acts, and
        trains no extra steps after it.
        """
        self.wait_for_step(process, run_dir, self.read_records(run_dir)[-1]["step"] + steps)
        os.kill(process.pid, signal.SIGTERM)
        printed = self.finish(process, code=75)
        return printed, self.read_records(run_dir)[-1]["step"]


@cache
def can_mount() -> bool:
    """Return whether this user can mount a file system in a new mount namespace."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def on_a_small_disk(place: Path, kept: Path, kilobytes: int) -> list[str]:
    """Return a command prefix: `place` is a disk of that size, and its final content is copied to `kept`.

    Without permission to mount, the prefix limits each file to a quarter of that size instead.
    """
    place.mkdir()
    if not can_mount():
        return ["prlimit", f"--fsize={kilobytes * 256}"]
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {place}"
    return ["unshare", "-rm", "sh", "-c", f'{mount} && "$@"; code=$?; cp -r {place} {kept}; exit $code', "sh"]


def on_a_disk_that_cannot_be_written(place: Path) -> list[str]:
    """Return a command prefix that makes `place` read-only.

    Without permission to mount, `place` is a file instead of a directory.
    """
    if not can_mount():
        place.write_text("a file where a directory should be")
        return []
    place.mkdir()
    return ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o ro tmpfs {place} && exec "$@"', "sh"]
