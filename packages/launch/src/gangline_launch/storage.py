"""Whether what a run needs lies on storage that the nodes see: found out before the submit. Torch-free."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import Problem

if TYPE_CHECKING:
    from gangline.config import Run

BESIDE_IMAGE = "of this command (which the batch script's last line uses outside the image)"

# File systems of one machine alone; whatever else is mounted (nfs, lustre, gpfs, beegfs, wekafs, ceph) is shared.
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
    """(mount point, kind of file system) of a path, or of the nearest folder above it that is there."""
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
    """Of (what it is, path), those on a file system of this machine alone. shared: mount points that nodes see."""
    for what, path in needed:
        point, kind = find_mount(path, mounts)
        inside = any(os.path.realpath(path).startswith(os.path.realpath(each).rstrip("/") + "/") for each in shared)
        if kind in OF_ONE_MACHINE and not inside and point not in shared:
            yield Problem(
                f"{what} is {path}, on {point} ({kind}), which other machines do not see.",
                "The nodes of the job read and write there.",
                f"Choose a place on shared storage; where nodes do see it:  'launch.shared=[{point}]'",
            )


def list_needed_paths(run: Run, run_dir: Path, code: bool = True) -> Iterator[tuple[str, str]]:
    """What the nodes have to see: the run directory, files that options name, and the code; an image has its own, but
    the last line of the batch script, which queues the job again, runs outside of it.
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
