"""Semaphores in shared memory: named by their launcher, so that those of a dead launcher can be found and removed.

Python's own tracker removes what a process leaves behind, unless the tracker is killed too, as it is where a whole
group of processes is. Torch-free.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
from pathlib import Path
from typing import Any

from gangline.errors import UserError
from gangline.launch.guard import read_birth, read_namespace

ROOT = Path("/dev/shm")
_OURS = re.compile(r"sem\.gangline-(?P<space>\d+)-(?P<pid>\d+)-(?P<start>\d+)-.*")


def name_semaphores() -> None:
    """Name this process's semaphores, and those of its ranks, by it; remove what dead launchers have left.

    Raises UserError where none can be made.
    """
    start = read_birth(os.getpid())
    if start is None or not ROOT.is_dir():  # elsewhere than on Linux they lie in no directory
        return
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # inherited
    prefix = f"/gangline-{read_namespace()}-{os.getpid()}-{start}"
    if config.get("semprefix") != prefix:
        config["semprefix"] = prefix
        sweep()
        try:
            multiprocessing.get_context("forkserver").Lock()
        except OSError as error:
            raise UserError(
                f"no semaphore can be made in {ROOT}: {error.strerror or error}.",
                "The processes of a run wait for each other by semaphores there.",
                f"mount -o remount,rw,size=1g {ROOT}; or in a container:  docker run --shm-size=1g",
            ) from error


def sweep() -> None:
    """Remove the semaphores of launchers that are dead; of others nothing."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(ROOT):
            match = _OURS.fullmatch(entry.name)
            # What lives among other process ids than ours cannot be seen from here.
            if match is None or int(match["space"]) != read_namespace() or entry.stat().st_uid != os.getuid():
                continue
            if read_birth(int(match["pid"])) != int(match["start"]):
                Path(entry.path).unlink(missing_ok=True)
