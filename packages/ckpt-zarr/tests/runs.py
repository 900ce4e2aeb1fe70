"""Real runs by the real command, on a small text with a small model, and what becomes of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

SECONDS = 300.0  # a command that takes longer has failed
SETTINGS = (
    "model=tiny",
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "batch.global_size=4",
    "batch.sequence_length=16",
    "schedule=constant",
    "run.sample=0",
    "validate.every=null",
    "track=[console,jsonl]",
    "track.console.every=1",
    "checkpoint=zarr",
)
# An agent that started the tests must not be taken for the one that starts a run.
FOREIGN = re.compile(r"RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SLURM_.*|GANGLINE_.*")


class Runs:
    """A directory with a text and runs in it."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        corpus = directory / "corpus"
        corpus.mkdir()
        for number in range(20):
            (corpus / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox jumps. " * 20)
        self.environment = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        self.environment["OMP_NUM_THREADS"] = "1"
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *words: str, prefix: Sequence[str] = (), module: Sequence[str] = ("-m", "gangline.cli.train")):
        """`train WORDS`, in a session of its own; `prefix`: a command that runs it."""
        settings = [] if words[0].startswith("resume=") else [*SETTINGS, f"data.path={self.directory}/corpus"]
        process = subprocess.Popen(
            [*prefix, sys.executable, *module, *settings, *words],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """What it printed; it must end so."""
        printed, _ = process.communicate(timeout=SECONDS)
        assert process.returncode == code, f"exit code {process.returncode}, wanted {code}:\n{printed}"
        return printed

    def train(self, *words: str, code: int = 0, prefix: Sequence[str] = ()) -> str:
        return self.finish(self.start(*words, prefix=prefix), code)

    def records(self, run: str) -> list[dict]:
        """The whole lines of metrics.jsonl."""
        path = self.directory / run / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def attempts(self, run: str) -> list[dict]:
        return [json.loads(line) for line in (self.directory / run / "attempts.jsonl").read_text().splitlines()]

    def wait_for_step(self, process: subprocess.Popen[str], run: str, step: int) -> None:
        deadline = time.monotonic() + SECONDS
        while not any(record["step"] >= step for record in self.records(run)):
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def end_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()


def processes(session: int) -> dict[int, tuple[int, str]]:
    """The living processes of a session: (parent, command line) of each."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(entry.name)] = int(fields[1]), command
    return found


def ranks(session: int) -> list[int]:
    """The ranks of a `train` that leads a session: forked by its fork server."""
    living = processes(session)
    servers = {pid for pid, (_, command) in living.items() if "forkserver" in command}
    return sorted(pid for pid in servers if living[pid][0] in servers)


def children(pid: int) -> dict[int, str]:
    """The processes that one has started, and their command lines."""
    found = {}
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            with contextlib.suppress(OSError):
                command = Path(f"/proc/{child}/cmdline").read_bytes()
                found[child] = command.replace(b"\0", b" ").decode(errors="replace")
    return found


@cache
def can_mount() -> bool:
    """Whether a user may have file systems of his own here."""
    command = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and subprocess.run(command, capture_output=True).returncode == 0


def on_a_small_disk(place: Path, kept: Path, kilobytes: int) -> list[str]:
    """A prefix: in the command, `place` is a disk of that size; what is on it in the end is copied to `kept`.

    Where no disk can be mounted, no file may be larger.
    """
    place.mkdir()
    if not can_mount():
        return ["prlimit", f"--fsize={kilobytes * 256}"]
    mount = f"mount -t tmpfs -o size={kilobytes}k tmpfs {place}"
    return ["unshare", "-rm", "sh", "-c", f'{mount} && "$@"; code=$?; cp -r {place} {kept}; exit $code', "sh"]


def on_a_disk_that_cannot_be_written(place: Path) -> list[str]:
    """A prefix: in the command, nothing can be put in `place`."""
    if not can_mount():
        place.write_text("a file where a directory should be")
        return []
    place.mkdir()
    return ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o ro tmpfs {place} && exec "$@"', "sh"]
