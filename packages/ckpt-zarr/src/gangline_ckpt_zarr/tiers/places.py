"""Where a run's memory tier lies on a machine. Torch-free."""

from __future__ import annotations

import os
from hashlib import blake2b
from pathlib import Path

from gangline.launch import name_of_this_node

ROOT = Path("/dev/shm")
SPARE = "spare"


def of_run(run_dir: str | Path) -> Path:
    """Of all nodes of a run that this machine plays."""
    digest = blake2b(os.path.realpath(run_dir).encode(), digest_size=8).hexdigest()
    return ROOT / f"gangline-{os.getuid()}" / digest


def directory(run_dir: str | Path) -> Path:
    """Of this node."""
    return of_run(run_dir) / name_of_this_node().replace("/", "-")


def directories(run_dir: str | Path) -> list[Path]:
    """Those that are there."""
    return sorted(path for path in of_run(run_dir).glob("*") if path.is_dir())
