"""Fixtures: one Slurm cluster for all tests in this folder, and runs on it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from own_cluster import OwnCluster

from gangline_testkit import RealRuns

STEPS = 16
MANY = 300  # steps of a run that is stopped several times
WORDS = (
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=2",
    "model.ffn_dim=64",
    "batch.global_size=8",
    "batch.sequence_length=64",
    f"run.steps={STEPS}",
    "run.sample=0",
    "validate.every=null",
    "track=[jsonl,console]",
    "precision=fp64",
    "run.deterministic=on",
    "schedule=constant",
    "schedule.warmup_steps=5",
    "checkpoint.every=4",
)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OwnCluster]:
    """Start a cluster of five nodes: n1 and n2 in one rack, the others in a second rack."""
    found = OwnCluster(tmp_path_factory.mktemp("slurm"), nodes=5)
    try:
        found.start()
        yield found
    finally:
        found.stop()


@pytest.fixture
def runs(slurm: OwnCluster, tmp_path: Path) -> Iterator[RealRuns]:
    """Yield runs whose commands use the cluster; then restore its nodes and wait until they are idle."""
    with RealRuns(tmp_path, WORDS, warm=False) as found:
        found.environment.update(slurm.environment)
        try:
            yield found
        finally:
            slurm.fix()


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float, float]]:
    """Return the loss curve of one process. The learning rate does not depend on the number of steps."""
    with RealRuns(tmp_path_factory.mktemp("undisturbed"), WORDS) as found:
        found.train("run.dir=out", "parallel=single", f"run.steps={MANY}")
        return found.read_curve("out")
