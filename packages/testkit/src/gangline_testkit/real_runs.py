"""Real runs of the real command, with a small model on a small text, for tests of what a user sees.

@pytest.fixture
def runs(tmp_path):
    with RealRuns(tmp_path) as found:
        yield found

def test_a_run_goes_on_where_it_was(runs):
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
_FOREIGN = re.compile(r"RANK|WORLD_SIZE|LOCAL_.*|GROUP_.*|ROLE_.*|MASTER_.*|TORCHELASTIC_.*|SLURM_.*|GANGLINE_.*")


def copy_environment() -> dict[str, str]:
    """Return the environment of this process without the variables that an agent sets for its ranks.

    If an agent started the tests, a run must not take it for the agent of its own ranks.
    """
    return {name: value for name, value in os.environ.items() if not _FOREIGN.fullmatch(name)}


def write_small_text(directory: Path) -> Path:
    """Create a directory of 40 short files, some 20 KB of English, and return it.

    Raises ValueError if it exists: another `RealRuns` uses it.
    """
    try:
        directory.mkdir()
    except FileExistsError as error:
        raise ValueError(
            f"{directory} exists: RealRuns({directory.parent}) was made before. "
            "Use that one for all runs of a test, or give each its own directory."
        ) from error
    for number in range(40):
        (directory / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox jumps. " * 20)
    return directory


class RealRuns:
    """A directory with a small text and runs in it. Processes that it started and that still live end with the block.

    settings: overrides that each new run begins with; a test's own follow and win. seconds: timeout of a command.
    warm: `train` and `fork` fork the command from a process that has torch loaded (`gangline_testkit.warm`); `start`
    starts it cold. loaded: further modules that this process loads, if every run would import them; they see
    `environment` as it is when the first run begins.
    `environment` holds variables for every command, in addition to `copy_environment()`; add to it.
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
        self.environment = {"OMP_NUM_THREADS": "1"}  # several ranks share a few cores
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
        """Start `train WORDS` in its own session, so that a test can press Ctrl-C on all of it; errors go to stdout.

        A new run gets the settings; one that is resumed (`resume=`), or made from another (`from=`), has its own.
        agent: what starts the ranks, as arguments of Python: ``["-m", "torch.distributed.run", "--nproc-per-node=2"]``.
        prefix: a command that runs all that, such as ``["prlimit", "--fsize=4096"]``.
        """
        return self._start([*prefix, sys.executable, *agent, "-m", TRAIN], words, self._make_variables(environment))

    def fork(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `train WORDS` from a process that has torch loaded: a third of the time, for tests of later behaviour.

        The returned process stands for one in another session: it passes SIGINT, SIGTERM and SIGHUP on, and if it is
        killed, so is that one.
        """
        if not self.warm:
            return self.start(*words, **environment)
        variables = self._make_variables(environment)
        if self.loaded and self._server is None:
            self._server = warm_starts.WarmServer(self.loaded, variables)
        server = self._server or warm_starts
        return self._start(server.make_command(TRAIN, variables), words, variables)

    def start_torchrun(self, agent: Sequence[str], *words: str, **environment: str) -> subprocess.Popen[str]:
        """Start `train WORDS` as the ranks of torchrun; `agent` is torchrun's options: ``["--nproc-per-node=2"]``.

        Agent and ranks are forked from a process that has torch loaded, which for six of them saves 15 s of one core;
        `start` with an agent starts them cold.
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
        """Wait for a process to end by itself, with this exit code, and return its output."""
        printed, _ = process.communicate(timeout=self.seconds)
        assert process.returncode == code, f"exit code {process.returncode}, wanted {code}:\n{printed}"
        return printed

    def train(self, *words: str, code: int = 0, prefix: Sequence[str] = (), **environment: str) -> str:
        """Run `train WORDS` to its end, with this exit code, and return its output. With a prefix it starts cold."""
        if prefix:
            return self.finish(self.start(*words, prefix=prefix, **environment), code)
        return self.finish(self.fork(*words, **environment), code)

    def expect_refusal(self, *words: str, **environment: str) -> str:
        """Return the message of `train` for a user's mistake: exit code 2, no traceback."""
        printed = self.train(*words, code=2, **environment)
        assert "Traceback" not in printed, printed
        return printed

    def wait_for_step(self, process: subprocess.Popen[str], run_dir: str, step: int, seconds: float = 240.0) -> None:
        """Wait until the record of the step is on disk; fail if the process ends without it, or after `seconds`."""
        deadline = time.monotonic() + seconds
        while not self._has_reached(run_dir, step):
            if process.poll() is not None:  # it may have reached the step between the two checks
                assert self._has_reached(run_dir, step), f"ended early:\n{process.communicate()[0]}"
                return
            assert time.monotonic() < deadline, f"step {step} was not reached in {seconds:g} s"
            time.sleep(0.01)

    # --- output files ------------------------------------------------------------------------------------------------

    def read_records(self, run_dir: str) -> list[dict[str, Any]]:
        """Return each step's newest record."""
        return read_records(self.directory / run_dir / "metrics.jsonl")

    def read_curve(self, run_dir: str) -> list[tuple[int, float, float]]:
        """Return (step, loss, gradient norm) of each record: equal for two runs that computed equal bits."""
        return [(record["step"], record["loss"], record["grad_norm"]) for record in self.read_records(run_dir)]

    def read_attempts(self, run_dir: str) -> list[dict[str, Any]]:
        """Return the lines of `attempts.jsonl`: each start and each rollback of the run."""
        return [json.loads(line) for line in (self.directory / run_dir / "attempts.jsonl").read_text().splitlines()]

    def _has_reached(self, run_dir: str, step: int) -> bool:
        path = self.directory / run_dir / "metrics.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return any(json.loads(line)["step"] >= step for line in lines if line.endswith("\n"))
