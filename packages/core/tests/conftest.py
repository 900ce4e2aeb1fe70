"""What the tests of core share: a real `train` in a directory of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("gangline", deadline=None)  # a busy machine is no failure
settings.load_profile("gangline")

TINY = [
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "batch.global_size=4",
    "batch.sequence_length=16",
    "run.steps=6",
    "run.sample=0",
    "validate.every=null",
    "track=[jsonl]",
]


class Train:
    """Runs `train` as a user would, on a small text and a small model."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.corpus = directory / "corpus"
        self.corpus.mkdir()
        for number in range(40):
            (self.corpus / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox jumps. " * 20)
        self.started: list[subprocess.Popen] = []

    def command(self, *arguments: str, tiny: bool = True) -> list[str]:
        settings = [*TINY, f"data.path={self.corpus}"] if tiny else []
        return [sys.executable, "-m", "gangline.cli.train", *settings, *arguments]

    def start(self, *arguments: str, tiny: bool = True, **more) -> subprocess.Popen:
        """A `train` in a process group of its own, so that a test can press Ctrl-C on all of it."""
        process = subprocess.Popen(
            self.command(*arguments, tiny=tiny),
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **more},
        )
        self.started.append(process)
        return process

    def __call__(self, *arguments: str, code: int = 0, tiny: bool = True, **more) -> str:
        """Run to the end; what was printed. The exit code must be `code`."""
        process = self.start(*arguments, tiny=tiny, **more)
        printed, _ = process.communicate(timeout=300)
        assert process.returncode == code, f"exit code {process.returncode}, wanted {code}:\n{printed}"
        return printed

    def refused(self, *arguments: str, tiny: bool = True, **more) -> str:
        """A user's mistake: exit code 2, a message, no traceback."""
        printed = self(*arguments, code=2, tiny=tiny, **more)
        assert "Traceback" not in printed, printed
        return printed

    def metrics(self, run_dir: str) -> list[dict]:
        path = self.directory / run_dir / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def losses(self, run_dir: str) -> list[tuple[int, float, float]]:
        return [(record["step"], record["loss"], record["grad_norm"]) for record in self.metrics(run_dir)]

    def wait_for_step(self, process: subprocess.Popen, run_dir: str, step: int, timeout: float = 240) -> None:
        """Return as soon as the record of `step` is on disk."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if any(record["step"] >= step for record in self._whole_lines(run_dir)):
                return
            if process.poll() is not None:  # between the two looks, perhaps, and with all its steps done
                done = any(record["step"] >= step for record in self._whole_lines(run_dir))
                assert done, f"ended early:\n{process.stdout.read()}"
                return
            time.sleep(0.01)
        raise AssertionError(f"step {step} was not reached in {timeout} s")

    def _whole_lines(self, run_dir: str) -> list[dict]:
        path = self.directory / run_dir / "metrics.jsonl"
        text = path.read_text() if path.exists() else ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def kill(self, process: subprocess.Popen) -> None:
        """SIGKILL to all of a `train`, also where it has just ended by itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def end_all(self) -> None:
        for process in self.started:
            if process.poll() is None:
                self.kill(process)


@pytest.fixture
def train(tmp_path: Path):
    runner = Train(tmp_path)
    yield runner
    runner.end_all()


def processes_of(session: int) -> list[int]:
    """The living processes of a session (a `train` started by the fixture leads one)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            if int(fields[3]) == session and fields[0] != "Z":
                found.append(int(entry.name))
    return found


@pytest.fixture
def living():
    return processes_of


@pytest.fixture
def random_batch():
    """A function (B, T, vocab_size, documents=1, seed=0) -> Batch of random tokens, a few of which do not count.

    documents: how many lie in each sequence, of different lengths, their positions starting at 0.
    """
    import torch

    from gangline.batch import Batch

    def make(B: int, T: int, vocab_size: int, documents: int = 1, seed: int = 0) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(0, vocab_size, (B, T + 1), generator=generator)
        position, document = torch.arange(T).expand(B, T), None
        if documents > 1:
            borders = [torch.randperm(T - 1, generator=generator)[: documents - 1] + 1 for _ in range(B)]
            starts = torch.stack([torch.zeros(T, dtype=torch.long).index_fill_(0, border, 1) for border in borders])
            document = starts.cumsum(1)
            position = position - (starts * position).cummax(1).values
        return Batch(
            tokens=tokens[:, :-1],
            targets=tokens[:, 1:],
            loss_mask=torch.rand(B, T, generator=generator) < 0.9,
            position=position,
            sample=torch.arange(B),
            document=document,
        )

    return make


class Strangers:
    """A folder of distributions that nobody installed: put it on the path, and they are found as any other is."""

    def __init__(self, site: Path) -> None:
        self.site = site
        site.mkdir()

    @property
    def environment(self) -> dict[str, str]:
        before = os.environ.get("PYTHONPATH")
        return {"PYTHONPATH": os.pathsep.join([str(self.site), *([before] if before else [])])}

    def add(
        self,
        distribution: str,
        source: str,
        *,
        module: str | None = None,
        plugin: str | None = None,
        version: str = "0.1.0",
        contract: str = "v1",
        requires: str = "",
    ) -> None:
        """One plugin: `source` is the text of its entry module."""
        module = module or distribution.replace("-", "_")
        (self.site / f"{module}.py").write_text(source)
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(f"[gangline.{contract}]\n{plugin or module} = {module}\n")


@pytest.fixture
def strangers(tmp_path: Path) -> Strangers:
    return Strangers(tmp_path / "site")


ALONE = """
import importlib.metadata as metadata
from pathlib import Path

ours = Path({ours!r})
everything = metadata.MetadataPathFinder.find_distributions


def visible(*context):
    for found in everything(*context):
        stranger = (found.metadata["Name"] or "").startswith("gangline-")
        if not stranger or Path(found.locate_file("")).is_relative_to(ours):
            yield found


metadata.MetadataPathFinder.find_distributions = visible
"""


@pytest.fixture
def core_alone(tmp_path: Path, tmp_path_factory, monkeypatch):
    """Core without the plugins that this environment may have, here and in processes started; strangers count."""
    import importlib.metadata

    from gangline.plugins import installed

    hook = tmp_path_factory.mktemp("alone")
    source = ALONE.format(ours=str(tmp_path))
    (hook / "sitecustomize.py").write_text(source)
    before = os.environ.get("PYTHONPATH")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(hook), *([before] if before else [])]))
    monkeypatch.delenv("GANGLINE_PLUGINS", raising=False)
    finder = importlib.metadata.MetadataPathFinder
    monkeypatch.setattr(finder, "find_distributions", finder.find_distributions)
    exec(source, {})
    installed.cache_clear()
    yield
    monkeypatch.undo()
    installed.cache_clear()
