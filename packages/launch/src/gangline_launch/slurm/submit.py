"""Submit of exactly one job: if sbatch got no answer, the queue shows whether the job exists. Torch-free."""

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

FILE = "submitting"  # in RUN_DIR/launch: exists from before sbatch until job.json is written
LOOKS, LOOK_SECONDS = 3, 5.0  # number and interval of queries for a job whose sbatch got no answer
PATIENCE = 60.0  # default time in seconds to wait for an unreachable controller


def submit(
    script: Path,
    run_dirs: Sequence[Path],
    words: Sequence[str] = (),
    tasks: Sequence[int] = (),
    patience: float | None = None,
) -> str:
    """Submit the script and write the job to each run's job.json; return the job's id.

    tasks     index of each run in the array job
    patience  seconds to wait for an unreachable controller; None: PATIENCE
    Raises UserError if Slurm refuses the job, SlurmAway if it is unknown whether the job exists (see `find_job`).
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
    """Cancel the job on OSError (disk full). Raises the OSError, or UserError if the job cannot be cancelled."""
    try:
        yield
    except OSError as error:
        try:
            commands.ask("scancel", number)
        except SlurmError as refused:
            raise UserError(
                f"job {number} was submitted, but its id could not be written to the run directory: {error}.",
                f"Cancelling the job failed too: {refused}.",
                f"To cancel the job:  scancel {number}",
            ) from error
        raise


def find_job(run_dir: Path) -> SubmittedJob | None:
    """Return the newest job of a run, also if sbatch got no answer or was killed; or None. Raises SlurmError."""
    path = Path(run_dir, jobs.FOLDER, FILE)
    if path.exists():
        request = json.loads(read_regular(path))
        number = commands.find_job_by_comment(request["mark"])
        if number is not None:
            jobs.write_job(run_dir, SubmittedJob("slurm", number, path.stat().st_mtime, request["task"]))
        path.unlink()
    return jobs.read_job(run_dir)


def _submit_job(script: Path, words: Sequence[str], mark: str, patience: float) -> str:
    """Submit with sbatch and return the job's id. If sbatch gets no answer, search the queue for the job."""
    environment, dropped = make_sbatch_environment(script)
    if dropped:
        print(
            f"train: environment variables not passed to sbatch: {', '.join(dropped)}; {script} sets these options",
            flush=True,
        )
    try:
        return commands.submit(str(script), words, environment)
    except SlurmAway as error:
        print(f"train: {error}; searching the queue for the job", flush=True)
        for look in range(LOOKS):
            if look:
                time.sleep(LOOK_SECONDS)
            if (number := commands.retry_while_away(lambda: commands.find_job_by_comment(mark), patience)) is not None:
                return number
        raise UserError(f"Slurm did not accept the job: {error}.", "The job is not in the queue. Try again.") from error


def _forget(run_dirs: Sequence[Path]) -> None:
    for run_dir in run_dirs:
        Path(run_dir, jobs.FOLDER, FILE).unlink(missing_ok=True)
