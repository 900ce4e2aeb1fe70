"""Detection of torchrun or Slurm: whether this process is one rank of a job that either started. Torch-free."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DetectedJob:
    """The job of ranks that an agent started, and the rank of this process in it."""

    agent: str  # "torchrun" or "slurm"
    key: str  # job key: equal for every start of one job, different for other jobs
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    restarts: int  # number of restarts of this job by the agent or the scheduler

    def get_environment(self) -> dict[str, str]:
        """Return the environment variables that torchrun would set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def detect(environ: Mapping[str, str] = os.environ) -> DetectedJob | None:
    """Return the job that this process is a rank of, or None if `train` was started by hand.

    A single task (`srun -n 1`, an interactive shell, a batch script) is not a rank: it may start processes itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _detect_torchrun(environ)
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))) > 1:
        return _detect_slurm(environ)
    return None


def _detect_torchrun(environ: Mapping[str, str]) -> DetectedJob:
    run_id = environ["TORCHELASTIC_RUN_ID"]
    if run_id == "none":  # torchrun without --rdzv-id: all starts of the job have one parent process
        run_id = f"{socket.gethostname()}-{os.getppid()}"
    return DetectedJob(
        agent="torchrun",
        key=f"torchrun-{run_id}",
        rank=int(environ["RANK"]),
        world=int(environ["WORLD_SIZE"]),
        local_rank=int(environ["LOCAL_RANK"]),
        local_world=int(environ["LOCAL_WORLD_SIZE"]),
        address=environ["MASTER_ADDR"],
        port=int(environ["MASTER_PORT"]),
        restarts=int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    )


def _detect_slurm(environ: Mapping[str, str]) -> DetectedJob:
    job, step = environ["SLURM_JOB_ID"], environ["SLURM_STEP_ID"]
    hosts = environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"]
    tasks = parse_tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"])
    return DetectedJob(
        agent="slurm",
        key=f"slurm-{job}-{step}",
        rank=int(environ["SLURM_PROCID"]),
        world=int(environ.get("SLURM_STEP_NUM_TASKS") or environ["SLURM_NTASKS"]),
        local_rank=int(environ["SLURM_LOCALID"]),
        local_world=tasks[int(environ.get("SLURM_NODEID", "0"))],
        address=environ.get("MASTER_ADDR") or parse_first_host(hosts),
        port=int(environ.get("MASTER_PORT") or 20000 + (int(job) * 64 + int(step) % 64) % 12000),
        restarts=int(environ.get("SLURM_RESTART_COUNT", "0")),
    )


def parse_first_host(hosts: str) -> str:
    """Return the first host of Slurm's host list: "gpu[003-007,9],login1" -> "gpu003"."""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])


def parse_tasks_per_node(counts: str) -> list[int]:
    """Return the number of tasks on each node from Slurm's short form: "4(x2),3" -> [4, 4, 3]."""
    tasks = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return tasks
