"""Semaphores in shared memory, named by their launcher, so that semaphores of a dead launcher can be removed.

Python's own tracker removes the semaphores of a dead process, unless the tracker is killed too, for example together
with all other processes of the process group. Torch-free.
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
    """Name the semaphores of this process and its ranks by its process id, and remove semaphores of dead launchers.

    Raises UserError if no semaphore can be created.
    """
    start = read_birth(os.getpid())
    if start is None or not ROOT.is_dir():  # only Linux has semaphores in a directory
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
                f"a semaphore cannot be created in {ROOT}: {error.strerror or error}.",
                "The processes of a run synchronize through semaphores in shared memory.",
                f"mount -o remount,rw,size=1g {ROOT}; or in a container:  docker run --shm-size=1g",
            ) from error


def sweep() -> None:
    """Remove only the semaphores of dead launchers."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(ROOT):
            match = _OURS.fullmatch(entry.name)
            # Processes of another PID namespace are not visible here.
            if match is None or int(match["space"]) != read_namespace() or entry.stat().st_uid != os.getuid():
                continue
            if read_birth(int(match["pid"])) != int(match["start"]):
                Path(entry.path).unlink(missing_ok=True)
