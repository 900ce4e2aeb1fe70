"""Runs `train` as a user would, on a small text and a small model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SMALL = (
    "model.dim=32",
    "model.layers=2",
    "model.heads=2",
    "model.kv_heads=1",
    "model.hidden=64",
    "batch.global_size=4",
    "batch.sequence_length=16",
    "run.steps=4",
    "run.sample=0",
    "validate.every=null",
    "track=[jsonl]",
)


def command(directory: Path, *words: str, module: str = "gangline.cli.train") -> subprocess.CompletedProcess:
    """Run in `directory`; output and errors together."""
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, *words],
        cwd=directory,
        env=env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=300,
    )


def train(directory: Path, *words: str) -> list[dict]:
    """The records of a run, which must end well; its directory is the one that `run.dir` names."""
    corpus = directory / "corpus"
    if not corpus.exists():
        corpus.mkdir()
        for number in range(40):
            (corpus / f"{number}.txt").write_text(f"file {number}: " + "the quick brown fox jumps. " * 20)
    done = command(directory, *SMALL, f"data.path={corpus}", *words)
    assert done.returncode == 0, done.stdout
    run_dir = next(word.partition("=")[2] for word in words if word.startswith(("run.dir=", "resume=")))
    return [json.loads(line) for line in (directory / run_dir / "metrics.jsonl").read_text().splitlines()]
