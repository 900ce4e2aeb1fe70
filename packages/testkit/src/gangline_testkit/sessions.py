"""Complete runs in the process of a test or on the ranks of a pool, without a command or a launcher."""

from __future__ import annotations

import email
import json
from pathlib import Path
from typing import Any

import torch

from gangline.mesh import Mesh
from gangline.run.directory import RunDirectory
from gangline.train.build import build
from gangline.train.rank import train
from gangline.train.session import Session
from gangline_testkit import rank
from gangline_testkit.pool import get_pool
from gangline_testkit.runs import build_small_run

# The default text, all of Python's standard library, takes longer to read than a small run.
TEXT = f"data.path={Path(email.__file__).parent}"
SETTINGS = (
    "checkpoint=torch",
    "checkpoint.every=2",
    "schedule=constant",
    "track=jsonl",
    "track.jsonl.figure=false",
    "model.dim=16",
    "model.vocab_size=256",
    "model.qk_norm=false",
    "precision=fp64",
    "validate.samples=8",
)


def open_session(run_dir: Path, *settings: str) -> Session:
    """Return the session of a run on this rank, restored from its checkpoint if the directory has one."""
    text = () if any(setting.startswith("data=") for setting in settings) else (TEXT,)
    run = build_small_run(*SETTINGS, *text, *settings, f"run.dir={run_dir}")
    if rank.index == 0 and not run_dir.exists():
        RunDirectory.create(run).unlock()
    mesh = Mesh.of(run.parallel.size_axes(rank.world))
    comms = rank.make_comms(mesh)
    comms.world.barrier()
    return build(run, RunDirectory.open(str(run_dir)), mesh, comms, torch.device("cpu"))


def train_session(run_dir: Path, *settings: str) -> int:
    """Train in this process to the end, and return the exit code."""
    return train(open_session(run_dir, *settings))


def train_on_ranks(world: int, run_dir: Path, *settings: str) -> int:
    """Train on the ranks of a pool to the end, and return the exit code of rank 0."""
    return get_pool(world).run(train_session, run_dir, *settings)[0]


def read_lines(run_dir: Path, file: str) -> list[dict[str, Any]]:
    """Return the lines of a JSON Lines file in the run directory, parsed."""
    return [json.loads(line) for line in (run_dir / file).read_text().splitlines()]
