"""A job that the scheduler or the agent starts again goes on in the run directory that it began with. Torch-free.

directory = requeue.find_earlier(*requeue.identify_job()) or ...      # else compose and write a new one
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

NOTES = Path("runs", f".jobs-{os.geteuid()}")  # of this user; a file for each job and command line: its run directory


def identify_job(environ: Mapping[str, str] = os.environ) -> tuple[str | None, int]:
    """What names the job that a lone `train` is in (None: no scheduler started it), and how often it was requeued."""
    if "SLURM_JOB_ID" not in environ:
        return None, 0
    return f"slurm-{environ['SLURM_JOB_ID']}", int(environ.get("SLURM_RESTART_COUNT", "0"))


def find_earlier(key: str | None, restarts: int) -> RunDirectory | None:
    """The run directory of an earlier start of this job with this command line, where there was one.

    Raises UserError where another user made the note that says so, or its folder.
    """
    if key is None:
        return None
    for path in (NOTES, _note(key)):
        refuse_others(path)
    try:
        return RunDirectory.open(read_regular(_note(key)).decode()) if restarts else None
    except (OSError, UnicodeDecodeError, UserError):  # it came to no whole run directory
        return None


def remember(key: str | None, run_dir: str | Path) -> None:
    """Write down where this job's run lies; without a place to write, a requeue starts a new run."""
    if key is not None:
        with contextlib.suppress(OSError):
            NOTES.parent.mkdir(exist_ok=True)
            NOTES.mkdir(mode=0o700, exist_ok=True)
            refuse_others(NOTES)
            write_whole(_note(key), str(Path(run_dir).resolve()))  # in place of a link, which it does not follow


def forget(key: str) -> None:
    """The run of this job is taken away: what comes next is another."""
    with contextlib.suppress(OSError):
        _note(key).unlink()
        NOTES.rmdir()  # unless it holds those of other jobs
        NOTES.parent.rmdir()


def _note(key: str) -> Path:
    return NOTES / hashlib.sha256("\0".join([key, *sys.argv[1:]]).encode()).hexdigest()[:32]
