"""Pytest fixtures for tests of plugins. Import the fixtures by name in conftest.py."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline_testkit import RealRuns, warm


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[RealRuns]:
    """`RealRuns` in a temporary directory."""
    with RealRuns(tmp_path) as real_runs:
        yield real_runs


@pytest.fixture
def random_batch():
    """Function (B, T, vocab_size, documents=1, seed=0) -> Batch of random tokens.

    The loss mask omits about a tenth of the tokens. documents: number of documents per sequence, of different
    lengths, each with positions from 0.
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
    """Folder of plugins that processes find like installed plugins if the folder is on PYTHONPATH."""

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
        """Add a plugin to the folder. source: text of its entry module."""
        module = module or distribution.replace("-", "_")
        (self.site / f"{module}.py").write_text(source)
        info = self.site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        needs = f"Requires-Dist: {requires}\n" if requires else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{needs}")
        (info / "entry_points.txt").write_text(f"[gangline.{contract}]\n{plugin or module} = {module}\n")

    def add_files(self, distribution: str, folder: Path) -> None:
        """Add a plugin from a folder with its module, or with its package of several modules."""
        module = distribution.replace("-", "_")
        if (folder / module).is_dir():
            shutil.copytree(folder / module, self.site / module)
            self.add(distribution, (folder / module / "__init__.py").read_text(), module=module)
            (self.site / f"{module}.py").unlink()
        else:
            self.add(distribution, (folder / f"{module}.py").read_text(), module=module)

    def run(
        self, module: str, *words: str, cwd: Path | None = None, timeout: float = 240
    ) -> subprocess.CompletedProcess[str]:
        """Run `python -m MODULE WORDS` with the plugins on PYTHONPATH, and return the completed process."""
        environment = {**os.environ, **self.environment, "OMP_NUM_THREADS": "1"}
        command = [*warm.make_command(module, environment), *words]
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout)


@pytest.fixture
def strangers(tmp_path: Path) -> Strangers:
    return Strangers(tmp_path / "site")


SHOWN = ("gangline-core", "gangline-basics", "gangline-testkit")
ALONE = """
import importlib.metadata as metadata
from pathlib import Path

ours = Path({ours!r})
everything = metadata.MetadataPathFinder.find_distributions


def visible(*context):
    for found in everything(*context):
        name = found.metadata["Name"] or ""
        if not name.startswith("gangline-") or name in {shown!r} or Path(found.locate_file("")).is_relative_to(ours):
            yield found


metadata.MetadataPathFinder.find_distributions = visible
"""


@pytest.fixture
def core_alone(tmp_path: Path, tmp_path_factory, monkeypatch):
    """Hide installed plugins except core, basics and the kit, here and in child processes; `strangers` stay visible."""
    import importlib.metadata

    from gangline.plugin.registry import installed

    hook = tmp_path_factory.mktemp("alone")
    source = ALONE.format(ours=str(tmp_path), shown=SHOWN)
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
