"""Runs of the real `train` command with a small model and a small text, for tests of user-visible behaviour.

@pytest.fixture
def runs(tmp_path):
    with RealRuns(tmp_path) as real_runs:
        yield real_runs

def test_resumed_run_continues_at_its_last_step(runs):
    runs.train("run.dir=out", "checkpoint=mine", "run.steps=3")
    runs.train("resume=out", "run.steps=6")
    assert [record["step"] for record in runs.read_records("out")] == [1, 2, 3, 4, 5, 6]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gangline.record import read_records
from gangline_testkit import warm as warm_starts
from gangline_testkit.processes import kill

TRAIN = "gangline.cli.train"
SMALL = (
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.ffn_dim=64",
    "batch.global_size=4",
    "batch.sequence_length=16",
    "run.steps=6",
    "run.sample=0",
    "validate.every=null",
    "track=[jsonl]",
    "track.jsonl.figure=false",
)
_LAUNCHER = re.compile(r"RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SLURM_.*|GANGLINE_.*")


def copy_environment() -> dict[str, str]:
    """Return the environment of this process without the variables that an agent or scheduler sets for ranks.

    Otherwise a run in tests that an agent started would use this agent for its own ranks.
    """
    return {name: value for name, value in os.environ.items() if not _LAUNCHER.fullmatch(name)}


def write_small_text(directory: Path) -> Path:
    """Create a directory of 40 short files, 20 KB of English in total, and return the directory.

    Raises ValueError if the directory exists, because another `RealRuns` uses it.
    """
    try:
        directory.mkdir()
    except FileExistsError as error:
        raise ValueError(
            f"{directory} already exists: another RealRuns uses {directory.parent}. "
            "Use one RealRuns for all runs of a test, or a separate directory for each RealRuns."
        ) from error
    for number in range(40):
        (directory / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox jumps. " * 20)
    return directory


class RealRuns:
    """Directory with a small text and the runs of a test. The end of the block kills live processes of the runs.

    settings: first overrides of each new run; the overrides of a test follow and win. seconds: timeout of a command.
    warm: whether `train` and `fork` fork the command from a process with torch loaded (`gangline_testkit.warm`);
    `start` always starts cold. loaded: further modules for that process to load, which every run should import; they
    are imported with the value of `environment` at the first run. `environment`: variables for every command, in
    addition to `copy_environment()`; tests may add variables.
    """

    def __init__(
        self,
        directory: Path,
        settings: Sequence[str] = SMALL,
        *,
        seconds: float = 300.0,
        warm: bool = True,
        loaded: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.settings = (f"data.path={write_small_text(directory / 'corpus')}", *settings)
        self.seconds = seconds
        self.warm = warm
        self.loaded = loaded
        self.environment = {"OMP_NUM_THREADS": "1"}  # because the ranks share few cores
        self._started: list[subprocess.Popen[str]] = []
        self._server: warm_starts.WarmServer | None = None

    def __enter__(self) -> RealRuns:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            if process.poll() is None:
                kill(process)
        if self._server is not None:
            self._server.close()

    # --- commands ----------------------------------------------------------------------------------------------------

    def start(
        self, *words: str, agent: Sequence[str] = (), prefix: Sequence[str] = (), **environment: str
    ) -> subprocess.Popen[str]:
        """Start `train WORDS` in its own session, to which a test can send Ctrl-C; stderr goes to stdout.

        A new run gets the settings of this object; a run with `resume=` or `from=` has its own settings.
        agent: Python arguments of the launcher: ``["-m", "torch.distributed.run", "--nproc-per-node=2"]``.
        prefix: command that runs everything else, such as ``["prlimit", "--fsize=4096"]``.
        """
        return self._start([*prefix, sys.executable, *agent, "-m", TRAIN], words, self._make_variables(environment))

    def fork(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `train WORDS` as a fork of a process that has torch loaded, in a third of the time of a cold start.

        The returned process is a client of the fork, which is in another session. The client forwards SIGINT, SIGTERM
        and SIGHUP to the fork; if the client is killed, the server kills the fork.
        """
        if not self.warm:
            return self.start(*words, **environment)
        variables = self._make_variables(environment)
        if self.loaded and self._server is None:
            self._server = warm_starts.WarmServer(self.loaded, variables)
        server = self._server or warm_starts
        return self._start(server.make_command(TRAIN, variables), words, variables)

    def start_torchrun(self, agent: Sequence[str], *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `train WORDS` as the ranks of torchrun. agent: options of torchrun, such as ``["--nproc-per-node=2"]``.

        Agent and ranks are forks of a process that has torch loaded, which saves 15 s of one core for six processes.
        `start` with an agent starts all processes cold.
        """
        variables = self._make_variables(environment)
        torchrun, train = (warm_starts.make_command(module, variables) for module in ("torch.distributed.run", TRAIN))
        return self._start([*torchrun, *agent, "--no-python", *train], words, variables)

    def _make_variables(self, more: dict[str, str]) -> dict[str, str]:
        return {**copy_environment(), **self.environment, **more}

    def _start(self, command: list[str], words: Sequence[str], variables: dict[str, str]) -> subprocess.Popen[str]:
        has_settings = any(word.startswith(("resume=", "from=")) for word in words)
        settings = () if has_settings else self.settings
        process = subprocess.Popen(
            [*command, *settings, *words],
            cwd=self.directory,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def finish(self, process: subprocess.Popen[str], code: int = 0) -> str:
        """Wait for the end of a process, check its exit code, and return its output."""
        printed, _ = process.communicate(timeout=self.seconds)
        assert process.returncode == code, f"exit code {process.returncode}, expected {code}; output:\n{printed}"
        return printed

    def train(self, *words: str, code: int = 0, prefix: Sequence[str] = (), **environment: str) -> str:
        """Run `train WORDS` to its end, check its exit code, and return its output. With a prefix it starts cold."""
        if prefix:
            return self.finish(self.start(*words, prefix=prefix, **environment), code)
        return self.finish(self.fork(*words, **environment), code)

    def expect_refusal(self, *words: str, **environment: str) -> str:
        """Run `train WORDS`, check for exit code 2 (user error) without a traceback, and return the output."""
        printed = self.train(*words, code=2, **environment)
        assert "Traceback" not in printed, printed
        return printed

    def wait_for_step(self, process: subprocess.Popen[str], run_dir: str, step: int, seconds: float = 240.0) -> None:
        """Wait until metrics.jsonl has the step. Raises AssertionError after `seconds`, or if the run ends."""
        deadline = time.monotonic() + seconds
        while not self._has_reached(run_dir, step):
            if (
                process.poll() is not None
            ):  # checks again, because the run may have reached the step just before its end
                assert self._has_reached(run_dir, step), (
                    f"the run ended before step {step}; output:\n{process.communicate()[0]}"
                )
                return
            assert time.monotonic() < deadline, f"{run_dir} did not reach step {step} within {seconds:g} s"
            time.sleep(0.01)

    # --- output files ------------------------------------------------------------------------------------------------

    def read_records(self, run_dir: str) -> list[dict[str, Any]]:
        """Return the newest record of each step, from metrics.jsonl."""
        return read_records(self.directory / run_dir / "metrics.jsonl")

    def read_curve(self, run_dir: str) -> list[tuple[int, float, float]]:
        """Return (step, loss, gradient norm) of each record, to compare two runs bit for bit."""
        return [(record["step"], record["loss"], record["grad_norm"]) for record in self.read_records(run_dir)]

    def read_attempts(self, run_dir: str) -> list[dict[str, Any]]:
        """Return the parsed lines of `attempts.jsonl`: one per start and rollback of the run."""
        return [json.loads(line) for line in (self.directory / run_dir / "attempts.jsonl").read_text().splitlines()]

    def _has_reached(self, run_dir: str, step: int) -> bool:
        path = self.directory / run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n"))
