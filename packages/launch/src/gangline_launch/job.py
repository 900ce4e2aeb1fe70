"""RUN_DIR/launch: which job of which scheduler the run is, what was submitted, and what its nodes said. Torch-free."""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline import UserError
from gangline.storage.files import lock_handle, open_lock, read_regular, write_whole

FOLDER = "launch"
FILE = "job.json"
LOCK = "submit.lock"
IDS = {"slurm": r"[0-9]+", "kubernetes": r"[a-z0-9]([-a-z0-9]*[a-z0-9])?/[a-z0-9]([-a-z0-9]*[a-z0-9])?"}


@dataclass(frozen=True)
class SubmittedJob:
    """The newest job of a run. `id` is the scheduler's name for it; `task` its place in the array of a sweep; `mark`
    what its submit has labelled it with, where names are the user's and may come again.
    """

    scheduler: str
    id: str
    submitted: float  # seconds since the epoch
    task: int | None = None
    mark: str = ""

    def __post_init__(self) -> None:
        """Refuse an id that a scheduler's command could take for an option. Raises ValueError."""
        form = IDS.get(self.scheduler)
        if form is not None and not re.fullmatch(form, str(self.id)):
            raise ValueError(f"{self.id!r} is not the id of a job of {self.scheduler}")

    @classmethod
    def create(cls, scheduler: str, id: str, task: int | None = None, mark: str = "") -> SubmittedJob:
        return cls(scheduler, id, time.time(), task, mark)


@contextmanager
def lock_submit(run_dir: Path) -> Iterator[None]:
    """While a command submits the run, no other one does. Raises UserError, also where the folder cannot be written."""
    try:
        handle = open_lock(make_launch_folder(run_dir) / LOCK)
        try:
            _lock(handle, run_dir)
            yield
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(
            f"what is submitted cannot be written down in {run_dir}: {error.strerror or error}.",
            "The script of the job, its number and what its nodes say lie there.",
            "Make room or give yourself the right to write there, or choose another run.dir.",
        ) from error


def _lock(handle: int, run_dir: Path) -> None:
    try:
        lock_handle(handle, seconds=0)
    except BlockingIOError:
        raise UserError(
            f"another command submits {run_dir} just now.",
            "Two jobs of a run spoil it.",
            f"To follow its job:  gangline launch attach {quote_path(run_dir)}",
        ) from None
    except OSError as error:
        raise UserError(
            f"nobody can say whether another command submits {run_dir}: {LOCK} cannot be locked: "
            f"{error.strerror or error}.",
            "Two jobs of a run spoil it, and what keeps them apart is a lock there.",
            "Mount that file system with locks, or choose another run.dir.",
        ) from error


def quote_path(run_dir: str | Path) -> str:
    """As it is typed in a shell."""
    return shlex.quote(str(run_dir))


def format_resume_hint(run_dir: str | Path) -> str:
    """The second line of a message."""
    return f"  To go on:  train resume={quote_path(run_dir)}"


def make_launch_folder(run_dir: str | Path) -> Path:
    """Made where it is not there."""
    path = Path(run_dir, FOLDER)
    path.mkdir(exist_ok=True)
    return path


def write_job(run_dir: str | Path, job: SubmittedJob) -> None:
    """In the place of an earlier one."""
    write_whole(make_launch_folder(run_dir) / FILE, json.dumps(asdict(job), indent=2) + "\n")


def read_job(run_dir: str | Path) -> SubmittedJob | None:
    """The newest job; None where the run was never submitted. Raises UserError for a damaged file."""
    try:
        return SubmittedJob(**json.loads(read_regular(Path(run_dir, FOLDER, FILE))))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{Path(run_dir, FOLDER, FILE)} is not as it was written: {error}.",
            "It says which job the run is. The scheduler still knows it:  squeue --me   or   kubectl get jobsets",
        ) from error


def require_job(run_dir: str | Path) -> SubmittedJob:
    """The newest job. Raises UserError where there is none."""
    if not Path(run_dir).is_dir():
        raise UserError(f"there is no run directory {run_dir}.")
    job = read_job(run_dir)
    if job is None:
        raise UserError(
            f"{run_dir} was never submitted: it has no {FOLDER}/{FILE}.",
            f"To submit it:  train resume={quote_path(run_dir)} launch=slurm",
        )
    return job
