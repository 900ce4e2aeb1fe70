"""Choice of the scheduler that has a job. Torch-free."""

from __future__ import annotations

from gangline import UserError
from gangline_launch.job import SubmittedJob
from gangline_launch.kubernetes.scheduler import KubernetesScheduler
from gangline_launch.slurm.scheduler import SlurmScheduler
from gangline_launch.state import Scheduler


def make_scheduler(job: SubmittedJob) -> Scheduler:
    """Return the scheduler of a job. Raises UserError for a scheduler that this version does not support."""
    if job.scheduler == "slurm":
        return SlurmScheduler()
    if job.scheduler == "kubernetes":
        return KubernetesScheduler()
    raise UserError(f"job {job.id} belongs to scheduler {job.scheduler}, which this version does not support.")
