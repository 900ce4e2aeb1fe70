"""Whether torchrun or Slurm started this process as one rank of a job. Torch-free."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class DetectedJob:
    """This process's place among the ranks that an agent started."""

    agent: str  # "torchrun" or "slurm"
    key: str  # the same for every start of one job, and for no other job
    rank: int
    world: int
    local_rank: int
    local_world: int
    address: str
    port: int
    restarts: int  # how often the agent or the scheduler has started this job again

    def get_environment(self) -> dict[str, str]:
        """What torchrun would have set."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_world),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def detect(environ: Mapping[str, str] = os.environ) -> DetectedJob | None:
    """The job that this process is a rank of, or None where `train` was simply typed.

    A single task (`srun` of one, an interactive shell, a batch script) is not a rank: it may start processes itself.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        return _detect_torchrun(environ)
    if "SLURM_STEP_ID" in environ and int(environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS", "1"))) > 1:
        return _detect_slurm(environ)
    return None


def _detect_torchrun(environ: Mapping[str, str]) -> DetectedJob:
    run_id = environ["TORCHELASTIC_RUN_ID"]
    if run_id == "none":  # torchrun was given no --rdzv-id; its own process is then what the starts have in common
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
    """The first of Slurm's host list: "gpu[003-007,9],login1" -> "gpu003"."""
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", re.split(r",(?![^\[]*\])", hosts)[0])


def parse_tasks_per_node(counts: str) -> list[int]:
    """Slurm's short form, written out: "4(x2),3" -> [4, 4, 3]."""
    tasks = []
    for part in counts.split(","):
        count, _, times = part.rstrip(")").partition("(x")
        tasks += [int(count)] * int(times or 1)
    return tasks
