"""Check before the submit that the files a run needs are on storage shared by all nodes. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import Problem

if TYPE_CHECKING:
    from gangline.config import Run

BESIDE_IMAGE = "of this command (used by the last line of the batch script, outside the image)"

# File systems local to one machine; all others (nfs, lustre, gpfs, beegfs, wekafs, ceph) count as shared.
OF_ONE_MACHINE = {
    "tmpfs",
    "ramfs",
    "overlay",
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "vfat",
    "squashfs",
}


def find_mount(path: str | Path, mounts: Path = Path("/proc/mounts")) -> tuple[str, str]:
    """Return (mount point, file system type) of a path, which need not exist."""
    real = os.path.realpath(path)
    best = ("/", "")
    for line in mounts.read_text(encoding="utf-8").splitlines() if mounts.exists() else ():
        _, point, kind, *_ = line.split(" ")
        point = point.replace("\\040", " ")
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(best[0]):
            best = (point, kind)
    return best


def find_local_paths(
    needed: Iterable[tuple[str, str]], shared: Sequence[str], mounts: Path = Path("/proc/mounts")
) -> Iterator[Problem]:
    """Yield a problem for each (description, path) on a local disk. shared: mount points to treat as shared storage."""
    for what, path in needed:
        point, kind = find_mount(path, mounts)
        inside = any(os.path.realpath(path).startswith(os.path.realpath(each).rstrip("/") + "/") for each in shared)
        if kind in OF_ONE_MACHINE and not inside and point not in shared:
            yield Problem(
                f"{what} is {path}, on {point} ({kind}), a local file system that other machines cannot read.",
                "All nodes of the job need this path.",
                f"Choose a path on shared storage. If all nodes do share {point}:  'launch.shared=[{point}]'",
            )


def list_needed_paths(run: Run, run_dir: Path, code: bool = True) -> Iterator[tuple[str, str]]:
    """Yield (description, path) of all that nodes need: run directory, files named by options, Python environment.

    A container image has its own code, but the last line of the batch script, which requeues the job, runs outside the
    image. code: false if the ranks run in an image.
    """
    yield "the run directory", str(run_dir)
    for place, config in run.iterate_parts():
        for name in config.file_options:
            value = getattr(config, name)
            paths = [value] if isinstance(value, str) else value if isinstance(value, list) else []
            for path in paths:
                if path and "://" not in path:
                    yield f"{place}.{name}", path
    yield "the Python environment" if code else f"the Python environment {BESIDE_IMAGE}", sys.prefix
