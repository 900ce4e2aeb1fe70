"""The same small run on other layouts, by the real command: what `metrics.jsonl` tells of each, beside one process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from functools import cached_property
from pathlib import Path

TIMEOUT = 900  # seconds for one command: eight processes share what the machine has left
STEPS = 12
LONGEST = 28  # what one process trains, for runs that are resumed
RELATIVE = 2e-5  # float32 over 28 steps of AdamW; measured: losses 2e-7, gradient norms 2e-6
SETTINGS = (
    "model=tiny",
    "model.dim=32",
    "model.heads=4",
    "model.hidden=64",
    "batch.global_size=8",
    "batch.sequence_length=16",
    "schedule=constant",  # a rate that knew the last step would draw another curve on the way to it
    "schedule.warmup_steps=2",
    "validate.every=4",
    "validate.samples=16",
    "run.sample=0",
    "track=[jsonl]",
)


FOREIGN = re.compile(r"RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SLURM_.*|GANGLINE_.*")


class Curves:
    """Runs in one directory, and what they wrote."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        corpus = directory / "corpus"
        corpus.mkdir()
        for number in range(40):
            (corpus / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox jumps. " * 20)
        # An agent that started the tests must not be taken for the one that starts a run.
        self.environment = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
        self.environment.update(OMP_NUM_THREADS="1", TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *command: str) -> subprocess.Popen[str]:
        """A Python with these arguments, in a process group of its own."""
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, processes: list[subprocess.Popen[str]]) -> None:
        """Wait for all; each must end well."""
        printed = [process.communicate(timeout=TIMEOUT)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(printed)

    def train(self, *words: str) -> None:
        """`train WORDS`."""
        self.finish([self.start("-m", "gangline.cli.train", *words)])

    def words(self, run_dir: str, *more: str) -> list[str]:
        """A new run, of the small model on the small text."""
        return [*SETTINGS, "data.path=corpus", f"run.steps={STEPS}", f"run.dir={run_dir}", *more]

    def records(self, run_dir: str) -> list[dict]:
        """The metrics of each step."""
        return [json.loads(line) for line in (self.directory / run_dir / "metrics.jsonl").read_text().splitlines()]

    @cached_property
    def alone(self) -> list[dict]:
        """What one process draws."""
        self.train(*self.words("alone", f"run.steps={LONGEST}"))
        return self.records("alone")

    def end_all(self) -> None:
        for process in self._started:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def same(found: list[dict], expected: list[dict]) -> None:
    """The steps found are those expected, with the same rate, loss, gradient norm, tokens and validation loss."""
    assert [record["step"] for record in found] == [record["step"] for record in expected]
    for name in ("learning_rate", "loss", "grad_norm", "validation_loss"):
        for one, other in zip(found, expected, strict=True):
            got, want = one.get(name), other.get(name)
            assert (got is None) == (want is None), f"{name} of step {one['step']} is {got!r}, expected {want!r}"
            if want is not None:
                assert abs(got - want) <= RELATIVE * abs(want), f"{name} of step {one['step']}: {got!r}, not {want!r}"
    assert [record["tokens"] for record in found] == [record["tokens"] for record in expected]
