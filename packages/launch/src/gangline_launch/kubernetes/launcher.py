"""Launcher `launch=kubernetes`: writes the manifests, applies them, follows the JobSet. Torch-free."""

from __future__ import annotations

import re
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from gangline import UserError
from gangline.launch.base import Launcher
from gangline.run.ending import clear_ending, read_ending, write_ending
from gangline.storage.files import write_whole
from gangline_launch import clocks, job as jobs, storage
from gangline_launch.follow import follow
from gangline_launch.give_back import give_back, keep_job_on_error
from gangline_launch.job import SubmittedJob
from gangline_launch.kubernetes import levels, manifests, tries
from gangline_launch.kubernetes.scheduler import KubectlError, KubernetesScheduler, run_kubectl
from gangline_launch.state import GONE

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.run.directory import RunDirectory
    from gangline.run.ending import RunEnding
    from gangline_launch.kubernetes.config import KubernetesLaunch

FILE = "jobset.yaml"
LATE = re.compile(r"no answer|timed? ?out|EOF|connection reset", re.IGNORECASE)  # kubectl may have applied it


class KubernetesLauncher(Launcher):
    """Launcher whose ranks run in pods; this process only follows them."""

    def __init__(self, config: KubernetesLaunch, run: Run) -> None:
        self.config, self.run = config, run

    def launch(self, directory: RunDirectory) -> int:
        """Apply the manifests and follow the job; return the run's exit code. Ctrl-C detaches. Raises UserError."""
        run_dir = directory.path.resolve()
        mark = uuid.uuid4().hex
        in_pod = self.config.map_to_pod(run_dir)
        assert in_pod is not None, "check() refuses a run directory that is not on the volume"
        text = dump(manifests.render(self.config, self.run, in_pod, mark))
        if self.config.dry_run:
            storage.report_unchecked([self.run])
            print(text, end="")
            return give_back(directory)
        path = run_dir / jobs.FOLDER / FILE
        name = manifests.make_name(in_pod, mark)
        job = SubmittedJob.create("kubernetes", f"{self.config.namespace}/{name}", mark=mark)
        with jobs.lock_submit(run_dir):
            refuse_second(run_dir)
            write_whole(path, text)
            levels.write_places(run_dir, self.config.levels)
            clocks.forget(run_dir)
            tries.forget(run_dir)
            submit(directory, job, path)
        with keep_job_on_error(directory, KubernetesScheduler()):
            print(f"train: JobSet {job.id}: {path}", flush=True)
            return follow(run_dir, KubernetesScheduler(), shown=directory.path)


def refuse_second(run_dir: Path) -> None:
    """Raise UserError if the run's earlier job is not over or its state is unknown: two jobs would damage the run."""
    job = jobs.read_job(run_dir)
    if job is None or job.scheduler != "kubernetes":
        return
    try:
        state = KubernetesScheduler().get_state(job)
    except KubectlError as error:
        raise UserError(
            f"{run_dir} may have a job already: {error}.",
            "Two jobs in one run directory would damage the run. Try again when the cluster answers.",
        ) from error
    if not state.over:
        raise UserError(
            f"{run_dir} has a job already: {job.id}, {state.describe()}.",
            f"To follow the job:  gangline launch attach {jobs.quote_path(run_dir)}",
            f"To cancel the job:  gangline launch cancel {jobs.quote_path(run_dir)}",
        )


def submit(directory: RunDirectory, job: SubmittedJob, manifest: Path) -> None:
    """Write job.json and apply the manifest, in this order: a killed or unanswered submit then loses no job.

    Raises UserError if the submit is refused, with all files restored. Raises UserError also if it is unknown whether
    the cluster took the job; the job then owns the directory.
    """
    before, ending = jobs.read_job(directory.path), read_ending(directory.path)
    jobs.write_job(directory.path, job)
    clear_ending(directory.path)  # the ending of an earlier job does not apply to this one
    try:
        run_kubectl("apply", "--filename", str(manifest))
    except UserError:
        _as_before(directory.path, before, ending)
        raise
    except KubectlError as error:
        try:
            refused = not LATE.search(str(error)) and KubernetesScheduler().get_state(job).phase == GONE
        except KubectlError:
            refused = False
        if refused:
            _as_before(directory.path, before, ending)
            raise UserError(f"{error}.", "The job was not submitted.") from error
        directory.hand_over()
        raise UserError(
            f"{error}; whether the cluster accepted the job is unknown. {directory.path} is not removed.",
            f"To check:  gangline launch status {jobs.quote_path(directory.path)}",
            f"To cancel the job:  gangline launch cancel {jobs.quote_path(directory.path)}",
            f"To submit again, after cancelling:  train resume={jobs.quote_path(directory.path)}",
        ) from error


def _as_before(run_dir: Path, job: SubmittedJob | None, ending: RunEnding | None) -> None:
    if job is None:
        (jobs.make_launch_folder(run_dir) / jobs.FILE).unlink(missing_ok=True)
    else:
        jobs.write_job(run_dir, job)
    if ending is not None:
        write_ending(run_dir, ending)


def dump(objects: list[dict[str, Any]]) -> str:
    """Return the objects as one YAML stream."""
    return "---\n".join(yaml.safe_dump(each, sort_keys=False, width=120) for each in objects)
