"""Files in RUN_DIR/launch: the run's job and scheduler, the job's script and its nodes' output. Torch-free."""

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
    """The newest job of a run.

    id: id of the job in the scheduler. task: index of the run in a sweep's array job. mark: unique label of the submit,
    since job names may recur.
    """

    scheduler: str
    id: str
    submitted: float  # seconds since the epoch
    task: int | None = None
    mark: str = ""

    def __post_init__(self) -> None:
        """Raise ValueError for an id that a scheduler's command could parse as an option."""
        form = IDS.get(self.scheduler)
        if form is not None and not re.fullmatch(form, str(self.id)):
            raise ValueError(f"{self.id!r} is not a job id of {self.scheduler}")

    @classmethod
    def create(cls, scheduler: str, id: str, task: int | None = None, mark: str = "") -> SubmittedJob:
        return cls(scheduler, id, time.time(), task, mark)


@contextmanager
def lock_submit(run_dir: Path) -> Iterator[None]:
    """Lock the run while a command submits it. Raises UserError if another command holds the lock, or on OSError."""
    try:
        handle = open_lock(make_launch_folder(run_dir) / LOCK)
        try:
            _lock(handle, run_dir)
            yield
        finally:
            os.close(handle)
    except OSError as error:
        raise UserError(
            f"cannot write the files of the job to {run_dir}: {error.strerror or error}.",
            "This directory stores the script of the job, the job id and the output of the nodes.",
            "Free disk space there, grant yourself write permission, or choose another run.dir.",
        ) from error


def _lock(handle: int, run_dir: Path) -> None:
    try:
        lock_handle(handle, seconds=0)
    except BlockingIOError:
        raise UserError(
            f"another command is submitting {run_dir} now.",
            "Two jobs in one run directory would damage the run.",
            f"To follow the job:  gangline launch attach {quote_path(run_dir)}",
        ) from None
    except OSError as error:
        raise UserError(
            f"cannot check whether another command is submitting {run_dir}: {LOCK} cannot be locked: "
            f"{error.strerror or error}.",
            "Two jobs in one run directory would damage the run, and only this lock prevents a second submit.",
            "Mount the file system with lock support, or choose another run.dir.",
        ) from error


def quote_path(run_dir: str | Path) -> str:
    """Return the path quoted for a shell."""
    return shlex.quote(str(run_dir))


def format_resume_hint(run_dir: str | Path) -> str:
    """Return a line of text with the command that resumes the run."""
    return f"  To resume:  train resume={quote_path(run_dir)}"


def make_launch_folder(run_dir: str | Path) -> Path:
    """Return RUN_DIR/launch, created if missing."""
    path = Path(run_dir, FOLDER)
    path.mkdir(exist_ok=True)
    return path


def write_job(run_dir: str | Path, job: SubmittedJob) -> None:
    """Write the run's newest job to job.json, replacing an earlier one."""
    write_whole(make_launch_folder(run_dir) / FILE, json.dumps(asdict(job), indent=2) + "\n")


def read_job(run_dir: str | Path) -> SubmittedJob | None:
    """Return the newest job; None if the run was never submitted. Raises UserError for a damaged file."""
    try:
        return SubmittedJob(**json.loads(read_regular(Path(run_dir, FOLDER, FILE))))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(
            f"{Path(run_dir, FOLDER, FILE)} is damaged: {error}.",
            "The file stores the job id of the run. To find the job:  squeue --me   or   kubectl get jobsets",
        ) from error


def require_job(run_dir: str | Path) -> SubmittedJob:
    """Return the newest job. Raises UserError if there is none."""
    if not Path(run_dir).is_dir():
        raise UserError(f"run directory {run_dir} does not exist.")
    job = read_job(run_dir)
    if job is None:
        raise UserError(
            f"{run_dir} was never submitted: {FOLDER}/{FILE} is missing.",
            f"To submit the run:  train resume={quote_path(run_dir)} launch=slurm",
        )
    return job
