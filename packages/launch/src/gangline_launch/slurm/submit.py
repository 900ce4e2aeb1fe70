"""One job for one request: where sbatch had no answer, the queue says whether there is a job. Torch-free."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gangline import UserError
from gangline.storage.files import read_regular, write_whole
from gangline_launch import job as jobs
from gangline_launch.job import SubmittedJob
from gangline_launch.slurm import commands
from gangline_launch.slurm.commands import SlurmAway, SlurmError
from gangline_launch.slurm.variables import make_sbatch_environment

FILE = "submitting"  # in RUN_DIR/launch, from before sbatch until job.json is written
LOOKS, LOOK_SECONDS = 3, 5.0  # a job that sbatch heard nothing of is looked for so often, so far apart
PATIENCE = 60.0  # seconds in which a controller that is away may come back, while a user waits


def submit(
    script: Path,
    run_dirs: Sequence[Path],
    words: Sequence[str] = (),
    tasks: Sequence[int] = (),
    patience: float | None = None,
) -> str:
    """The number of the new job, which each run's job.json then names. tasks: the place of each run in an array;
    patience: seconds in which a controller that is away may come back.

    Raises UserError where Slurm refused it, SlurmAway where it is unknown whether there is a job (see `find_job`).
    """
    mark = f"gangline-{uuid.uuid4().hex}"
    places: Sequence[int | None] = tasks or [None] * len(run_dirs)
    for run_dir, task in zip(run_dirs, places, strict=True):
        write_whole(jobs.make_launch_folder(run_dir) / FILE, json.dumps({"mark": mark, "task": task}) + "\n")
    try:
        number = _submit_job(script, [*words, f"--comment={mark}"], mark, PATIENCE if patience is None else patience)
    except UserError:
        _forget(run_dirs)
        raise
    with cancel_on_error(number):
        for run_dir, task in zip(run_dirs, places, strict=True):
            jobs.write_job(run_dir, SubmittedJob.create("slurm", number, task))
        _forget(run_dirs)
    return number


@contextmanager
def cancel_on_error(number: str) -> Iterator[None]:
    """A job that cannot be written down, such as on a full disk, is none. Raises UserError, or the OSError."""
    try:
        yield
    except OSError as error:
        try:
            commands.ask("scancel", number)
        except SlurmError as refused:
            raise UserError(
                f"job {number} was submitted, and could not be written down: {error}.",
                f"Neither could it be cancelled: {refused}.",
                f"To end it:  scancel {number}",
            ) from error
        raise


def find_job(run_dir: Path) -> SubmittedJob | None:
    """The newest job of a run, also one whose sbatch had no answer or was killed. Raises SlurmAway."""
    path = Path(run_dir, jobs.FOLDER, FILE)
    if path.exists():
        request = json.loads(read_regular(path))
        number = commands.find_job_by_comment(request["mark"])
        if number is not None:
            jobs.write_job(run_dir, SubmittedJob("slurm", number, path.stat().st_mtime, request["task"]))
        path.unlink()
    return jobs.read_job(run_dir)


def _submit_job(script: Path, words: Sequence[str], mark: str, patience: float) -> str:
    """The number of the job. The controller may still be at it where sbatch had no answer."""
    environment, dropped = make_sbatch_environment(script)
    if dropped:
        print(f"train: not passed to sbatch: {', '.join(dropped)}; {script} sets these options", flush=True)
    try:
        return commands.submit(str(script), words, environment)
    except SlurmAway as error:
        print(f"train: {error}; is there a job of it?", flush=True)
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_SECONDS)
            if (number := commands.retry_while_away(lambda: commands.find_job_by_comment(mark), patience)) is not None:
                return number
        raise UserError(f"Slurm did not take the job: {error}.", "None is in the queue. Try again.") from error


def _forget(run_dirs: Sequence[Path]) -> None:
    for run_dir in run_dirs:
        Path(run_dir, jobs.FOLDER, FILE).unlink(missing_ok=True)
