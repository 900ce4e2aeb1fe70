"""Requeue: a job that the scheduler or the agent restarts continues in its first run directory. Torch-free.

directory = requeue.find_earlier(*requeue.identify_job()) or ...      # else compose a run and write its directory
requeue.remember(requeue.identify_job()[0], directory.path)
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from gangline.errors import UserError
from gangline.run.directory import RunDirectory
from gangline.run.files import refuse_others
from gangline.storage.files import read_regular, write_whole

NOTES = Path("runs", f".jobs-{os.geteuid()}")  # folder per user; a note per job and command line has its run directory


def identify_job(environ: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """Return (key of the job, number of its requeues) for a `train` that is not a rank; (None, 0) without Slurm."""
    if "SLURM_JOB_ID" not in environ:
        return None, 0
    return f"slurm-{environ['SLURM_JOB_ID']}", int(environ.get("SLURM_RESTART_COUNT", "0"))


def find_earlier(key: str | None, restarts: int) -> RunDirectory | None:
    """Return the run directory of an earlier start of this job with this command line, or None.

    Raises UserError if another user owns the note with that directory's path, or the folder of the note.
    """
    if key is None:
        return None
    for path in (NOTES, _note(key)):
        refuse_others(path)
    try:
        return RunDirectory.open(read_regular(_note(key)).decode()) if restarts else None
    except (OSError, UnicodeDecodeError, UserError):  # there is no complete run directory
        return None


def remember(key: str | None, run_dir: str | Path) -> None:
    """Store the path of this job's run directory in a note; if that fails, a requeue starts a new run."""
    if key is not None:
        with contextlib.suppress(OSError):
            NOTES.parent.mkdir(exist_ok=True)
            NOTES.mkdir(mode=0o700, exist_ok=True)
            refuse_others(NOTES)
            write_whole(_note(key), str(Path(run_dir).resolve()))  # replaces a link without following it


def forget(key: str) -> None:
    """Delete the note of this job after its run was deleted, so that the next start is a new run."""
    with contextlib.suppress(OSError):
        _note(key).unlink()
        NOTES.rmdir()  # fails if it has notes of other jobs
        NOTES.parent.rmdir()


def _note(key: str) -> Path:
    return NOTES / hashlib.sha256("\0".join([key, *sys.argv[1:]]).encode()).hexdigest()[:32]
