"""RUN_DIR/launch: which job of which scheduler the run is, what was submitted, and what its nodes said. Torch-free."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from gangline import UserError
from gangline.tools import write_whole

FOLDER = "launch"
FILE = "job.json"


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

    @classmethod
    def now(cls, scheduler: str, id: str, task: int | None = None, mark: str = "") -> SubmittedJob:
        return cls(scheduler, id, time.time(), task, mark)


def folder(run_dir: str | Path) -> Path:
    """Made where it is not there."""
    path = Path(run_dir, FOLDER)
    path.mkdir(exist_ok=True)
    return path


def write_job(run_dir: str | Path, job: SubmittedJob) -> None:
    """In the place of an earlier one."""
    write_whole(folder(run_dir) / FILE, json.dumps(asdict(job), indent=2) + "\n")


def read_job(run_dir: str | Path) -> SubmittedJob | None:
    """The newest job; None where the run was never submitted."""
    try:
        return SubmittedJob(**json.loads(Path(run_dir, FOLDER, FILE).read_text()))
    except FileNotFoundError:
        return None


def job_of(run_dir: str | Path) -> SubmittedJob:
    """The newest job. Raises UserError where there is none."""
    if not Path(run_dir).is_dir():
        raise UserError(f"there is no run directory {run_dir}.")
    job = read_job(run_dir)
    if job is None:
        raise UserError(
            f"{run_dir} was never submitted: it has no {FOLDER}/{FILE}.",
            f"To submit it:  train resume={run_dir} launch=slurm",
        )
    return job
