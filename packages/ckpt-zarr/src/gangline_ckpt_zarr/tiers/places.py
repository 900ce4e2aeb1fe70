"""Directories of a run's memory tier on a machine. Torch-free."""

from __future__ import annotations

import contextlib
import os
import stat
from hashlib import blake2b
from pathlib import Path

from gangline import UserError
from gangline.launch.network import name_of_this_node

ROOT = Path("/dev/shm")
SPARE = "spare"
TROUBLE = ".trouble"  # file in the directory of a node, with its keeper's message about a failure


def locate_run(run_dir: str | Path) -> Path:
    """Return the memory-tier directory of a run, common to all its nodes on this machine."""
    digest = blake2b(os.path.realpath(run_dir).encode(), digest_size=8).hexdigest()
    return locate_user() / digest


def locate_user() -> Path:
    """Return the memory-tier directory of this user on this machine; any user may create files next to it."""
    return ROOT / f"gangline-{os.getuid()}"


def refuse_other_owner() -> None:
    """Raise UserError if `locate_user()` belongs to another user, who might read and change what a run stores there."""
    place = locate_user()
    try:
        status = place.lstat()
    except FileNotFoundError:
        return
    risk = ", so another user could change the run's checkpoints in memory"
    wrong = "is not a directory" if not stat.S_ISDIR(status.st_mode) else ""
    wrong = wrong or (f"belongs to user {status.st_uid}{risk}" if status.st_uid != os.getuid() else "")
    wrong = wrong or (f"is writable by other users{risk}" if status.st_mode & 0o022 else "")
    if wrong:
        raise UserError(
            f"{place} {wrong}.",
            "The memory tier stores checkpoints in this directory, and runs resume from them.",
            f"The owner or an administrator can remove the directory:  sudo rm -r {place}",
            "Or train without checkpoints in memory:  checkpoint.memory_every=null",
        )


def make() -> None:
    """Create `locate_user()`, readable by this user alone. Raises OSError, UserError."""
    with contextlib.suppress(FileExistsError):
        locate_user().mkdir(parents=True, mode=0o700)
    refuse_other_owner()


def locate_node(run_dir: str | Path) -> Path:
    """Return the memory-tier directory of a run for this node."""
    return locate_run(run_dir) / name_of_this_node().replace("/", "-")


def list_node_directories(run_dir: str | Path) -> list[Path]:
    """Return the memory-tier directories of a run's nodes that exist on this machine, sorted."""
    return sorted(path for path in locate_run(run_dir).glob("*") if path.is_dir())
