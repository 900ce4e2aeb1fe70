"""Check before the submit that the files a run needs are on storage shared by all nodes. Torch-free."""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gangline import Problem
from gangline.config import DataConfig, ModelConfig
from gangline.config.validation import PATH as SETS, read_sets
from gangline_basics.launch.changed_data import CACHE

if TYPE_CHECKING:
    from gangline.config import PartConfig, Run

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
        for option, path in _list_paths(place, config):
            if "://" not in path:
                yield option, path
    yield "the Python environment" if code else f"the Python environment {BESIDE_IMAGE}", sys.prefix


def find_absent_inputs(place: str, config: PartConfig) -> dict[str, str]:
    """Return path -> option of the inputs of data or of a model that this machine lacks; a URL counts as absent.

    place: path of the part's options, such as "data". Returns {} for other parts: their paths may be outputs.
    """
    if not isinstance(config, DataConfig | ModelConfig):
        return {}
    paths = [(option, path) for option, path in _list_paths(place, config) if option != f"{place}.{CACHE}"]
    return {path: option for option, path in paths if not _is_present(path)}


def report_unchecked(runs: Iterable[Run]) -> None:
    """Print one notice on stderr that names the inputs of the runs whose check a dry run leaves out."""
    inputs: dict[str, str] = {}
    for run in runs:
        sets = [(f"{SETS}.{name}", config) for name, config in read_sets(run)[0].items()]
        for place, config in [*sets, ("data", run.data), ("model", run.model)]:
            inputs |= find_absent_inputs(place, config)
    if inputs:
        words = ", ".join(f"{option}={path}" for path, option in inputs.items())
        print(
            f"train: note: not checked, because this machine does not have the files: {words}\n"
            "  The job needs them. The check runs when you submit without launch.dry_run.",
            file=sys.stderr,
        )


def _is_present(path: str) -> bool:
    """Return whether a path, a glob pattern, or a prefix of file names such as Megatron's matches a file here."""
    path = os.path.expanduser(path)
    patterns = (path, f"{glob.escape(path)}.*")
    return "://" not in path and (os.path.exists(path) or any(glob.glob(pattern) for pattern in patterns))


def _list_paths(place: str, config: PartConfig) -> Iterator[tuple[str, str]]:
    """Yield (option, path) of each file that the options of a part name, such as ("data.sources.web", "/data/web")."""
    for name in config.file_options:
        value = getattr(config, name)
        mapping = value if isinstance(value, dict) else {}
        paths = value if isinstance(value, list) else [value]
        yield from ((f"{place}.{name}.{key}", path) for key, path in mapping.items() if path)
        yield from ((f"{place}.{name}", path) for path in paths if isinstance(path, str) and path)
