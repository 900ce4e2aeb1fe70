"""Options of `launch` that all cluster schedulers share. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from gangline import Problem, UserError
from gangline.config import NonNegativeInt, OneOf, PositiveFloat, RunsCode
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.nodes import parse_nodes
from gangline_launch import fabric, setup, storage
from gangline_launch.fabric import FABRICS

if TYPE_CHECKING:
    from gangline.config import PartConfig, Run

STOP_SECONDS = 5.0  # time in seconds reserved at the end of launch.signal_seconds for the agents to stop


@dataclass
class ClusterLaunch(ElasticLaunch, ABC):
    """Base options of launchers whose scheduler allocates nodes and starts one elastic agent per node."""

    here: ClassVar[bool] = False

    gpus_per_node: NonNegativeInt | None = None  # number of GPUs per node; null: as reported by Slurm (Kubernetes: 8)
    spares: NonNegativeInt = 0  # number of spare nodes beyond launch.nodes, which wait to replace lost nodes
    signal_seconds: PositiveFloat | None = 120.0  # seconds from the scheduler's stop signal to SIGKILL; null: no signal
    join_seconds: PositiveFloat = 120.0  # rendezvous timeout in seconds, for the minimum number of nodes
    # container image with gangline installed; null: no container, but the submitting Python
    image: Annotated[str | None, RunsCode()] = None
    fabric: Annotated[str, OneOf(FABRICS)] = "default"  # name of a set of network settings (NCCL, EFA, ...)
    futile_requeues: NonNegativeInt = 3  # maximum number of consecutive job starts without a new step
    shared: list[str] = field(default_factory=list)  # mount points to treat as shared storage, not as local disks
    setup: Annotated[list[str], RunsCode()] = field(
        default_factory=list
    )  # bash setup commands that each node runs before its agent ('module load cuda'); a failure ends the job
    dry_run: bool = False  # dry run: print the batch script or manifests without submitting the job

    def get_seconds_to_stop(self) -> float | None:
        return min(self.grace_seconds, max(1.0, (self.signal_seconds or self.grace_seconds) - STOP_SECONDS))

    def count_max_nodes(self) -> int:
        """Return the maximum number of nodes that train; spares are not counted."""
        return parse_nodes(self.nodes)[1]

    def format_elastic_nodes(self) -> str:
        """Return the agents' argument --nodes, "FEWEST:MOST": `launch.nodes` with spares added to MOST."""
        fewest, most = parse_nodes(self.nodes)
        return f"{fewest}:{most + self.spares}"

    def get_environment(self, run: Run) -> dict[str, str]:
        return fabric.get_variables(self.fabric)

    def defers_check(self, config: PartConfig) -> bool:
        return self.dry_run and bool(storage.find_absent_inputs("", config))

    def survives(self) -> bool:
        """Return whether the job can continue without one of its nodes."""
        fewest, most = parse_nodes(self.format_elastic_nodes())
        return fewest < most

    @abstractmethod
    def count_gpus_per_node(self, run: Run) -> int:
        """Return the number of GPUs per node; 0 for a run on the CPU."""

    def count_ranks(self, run: Run) -> int:
        return self.processes or run.parallel.count_ranks(self.count_gpus_per_node(run) * self.count_max_nodes())

    def check(self, run: Run) -> list[Problem]:
        """Return problems of node counts, agents, setup commands, ranks per GPU, and an object store as run.dir."""
        try:
            parse_nodes(self.nodes)
        except UserError as error:
            return [error.to_problem()]
        problems = []
        if "://" in (run.job.dir or ""):
            why = "Nodes coordinate there with locks and atomic renames, which object stores do not support."
            fix = "run.dir=/shared/..., on a file system that all nodes mount. Checkpoints may go to an object store."
            problems.append(
                Problem(f"run.dir must be a directory on a shared file system, and {run.job.dir} is not.", why, fix)
            )
        if self.agents is not None:
            what = (
                f"launch.agents={self.agents} is not supported on a cluster: the scheduler starts one agent per node."
            )
            problems.append(Problem(what, "", "Omit launch.agents."))
        problems += setup.find_setup_problems(self.setup)
        gpus, ranks = self.count_gpus_per_node(run), self.count_ranks_of_node(run)
        if 0 < gpus < ranks:
            world = self.count_ranks(run)
            what = f"launch.nodes={self.nodes}: {world} processes need {ranks} GPUs per node, and a node has {gpus}."
            fix = f"launch.processes={gpus * self.count_max_nodes()}, or a larger launch.nodes."
            problems.append(Problem(what, "Each process uses one GPU.", fix))
        if self.gpus_per_node and self.processes is None and ranks < self.gpus_per_node:
            world, reserved = self.count_ranks(run), self.gpus_per_node * self.count_max_nodes()
            what = f"the job would reserve {reserved} GPUs, and the run has {world} process{'es' * (world != 1)}."
            fix = f"parallel=fsdp, or another layout of {reserved} processes; or a smaller launch.nodes."
            problems.append(Problem(what, f"launch.nodes={self.nodes} launch.gpus_per_node={self.gpus_per_node}", fix))
        return problems
