"""Core without other packages: trains, saves and resumes with the parts in tests/own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

OWN = Path(__file__).parent / "own"
# Hide all packages but core and `own_parts`, both as distributions and as modules.
ALONE = """
import importlib.metadata as metadata
import sys

everything = metadata.MetadataPathFinder.find_distributions


def visible(*context):
    return (found for found in everything(*context) if found.metadata["Name"] in ("own-parts", "gangline-core"))


metadata.MetadataPathFinder.find_distributions = visible
for name in ("basics", "testkit", "models", "moe", "finetune", "health", "launch", "planner", "track", "dataloader"):
    sys.modules[f"gangline_{name}"] = None
"""


@pytest.fixture
def site(tmp_path):
    """Return a folder for PYTHONPATH in which `own_parts` is the only plugin."""
    folder = tmp_path / "site"
    info = folder / "own_parts-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[gangline.v1]\nown = own_parts\n")
    (folder / "sitecustomize.py").write_text(ALONE)
    return folder


def run(site: Path, module: str, *words: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([str(site), str(OWN)])
    environment = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-m", module, *words]
    return subprocess.run(command, env=environment, cwd=site, capture_output=True, text=True, timeout=240)


def losses(directory: Path) -> dict[int, float]:
    return dict(json.loads(line) for line in (directory / "losses.jsonl").read_text().splitlines())


SMALL = ("batch.global_size=8", "batch.micro_size=4", "batch.sequence_length=16", "validate.every=null")


def test_third_party_parts_train_and_resume_identically(site):
    straight = run(site, "gangline.cli.train", "run.dir=straight", "run.steps=12", *SMALL)
    assert straight.returncode == 0, straight.stderr
    seen = losses(site / "straight")
    assert list(seen) == list(range(1, 13))
    assert seen[1] == pytest.approx(math.log(8), abs=0.05)
    assert seen[12] < seen[1] - 0.05
    parts = json.loads((site / "straight" / "parts.json").read_text())
    every = [part for group in parts.values() for part in (group if isinstance(group, list) else [group])]
    assert {part["distribution"] for part in every} == {"own-parts"}

    first = run(site, "gangline.cli.train", "run.dir=halves", "run.steps=6", *SMALL)
    second = run(site, "gangline.cli.train", "resume=halves", "run.steps=12")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert losses(site / "halves") == seen


def test_third_party_parts_are_listed_by_plugins(site):
    listed = run(site, "gangline.cli.main", "plugins")
    assert listed.returncode == 0, listed.stderr
    assert "own-parts" in listed.stdout
    asked = run(site, "gangline.cli.train", "optimizer=adamw")
    assert asked.returncode == 2
    assert "gangline-basics" in asked.stderr
    wrong = run(site, "gangline.cli.train", "batch.global_size=0", "model.vocab_size=0")
    assert wrong.returncode == 2
    assert "batch.global_size=0" in wrong.stderr
