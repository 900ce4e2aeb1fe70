"""What a run on any scheduler's nodes may say. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from gangline import Problem, UserError
from gangline.config import NonNegativeInt, OneOf, PositiveFloat, RunsCode
from gangline_basics.launch.config import ElasticLaunch
from gangline_basics.launch.nodes import parse_nodes
from gangline_launch import fabric, setup
from gangline_launch.fabric import FABRICS

if TYPE_CHECKING:
    from gangline.config import Run

STOP_SECONDS = 5.0  # of a scheduler's notice, for the agents themselves


@dataclass
class ClusterLaunch(ElasticLaunch, ABC):
    """Nodes that a scheduler gives: it starts one elastic agent on each of them."""

    here: ClassVar[bool] = False

    gpus_per_node: NonNegativeInt | None = None  # null: as many as the scheduler says that a node has
    spares: NonNegativeInt = 0  # nodes beyond launch.nodes, which wait and take the place of one that is lost
    signal_seconds: PositiveFloat | None = 120.0  # from the scheduler's signal to its SIGKILL: for the last save
    join_seconds: PositiveFloat = 120.0  # how long the fewest nodes are waited for before the job ends
    image: Annotated[str | None, RunsCode()] = (
        None  # a container with gangline in it; null: the environment of the submit
    )
    fabric: Annotated[str, OneOf(FABRICS)] = "default"  # settings of the network by its name
    futile_requeues: NonNegativeInt = 3  # limit of starts of the job in a row without a new step; then it ends
    shared: list[str] = field(default_factory=list)  # mount points that nodes see, though they look like local disks
    setup: Annotated[list[str], RunsCode()] = field(
        default_factory=list
    )  # bash before the agents ('module load cuda'); failure ends the job
    dry_run: bool = False  # print what would be submitted, and submit nothing

    def get_seconds_to_stop(self) -> float | None:
        return min(self.grace_seconds, max(1.0, (self.signal_seconds or self.grace_seconds) - STOP_SECONDS))

    def count_max_nodes(self) -> int:
        """Those that train; spares come on top."""
        return parse_nodes(self.nodes)[1]

    def format_elastic_nodes(self) -> str:
        """`launch.nodes` of the agents."""
        fewest, most = parse_nodes(self.nodes)
        return f"{fewest}:{most + self.spares}"

    def get_environment(self, run: Run) -> dict[str, str]:
        return fabric.get_variables(self.fabric)

    def survives(self) -> bool:
        """Whether the job can go on without one of its nodes."""
        fewest, most = parse_nodes(self.format_elastic_nodes())
        return fewest < most

    @abstractmethod
    def count_gpus_per_node(self, run: Run) -> int:
        """Of each node; none for a run on the CPU."""

    def count_ranks(self, run: Run) -> int:
        return self.processes or run.parallel.count_ranks(self.count_gpus_per_node(run) * self.count_max_nodes())

    def check(self, run: Run) -> list[Problem]:
        """Numbers of nodes without sense, more ranks than a node has GPUs, a run directory where nodes cannot meet."""
        try:
            parse_nodes(self.nodes)
        except UserError as error:
            return [error.to_problem()]
        problems = []
        if "://" in (run.job.dir or ""):
            why = "Nodes meet there, with locks and with files that are replaced whole; no object store has them."
            mend = "run.dir=/shared/..., on a file system that all nodes see. Checkpoints may go to an object store."
            problems.append(Problem(f"run.dir={run.job.dir} is no directory.", why, mend))
        if self.agents is not None:
            what = f"launch.agents={self.agents}: the scheduler starts one agent on each node."
            problems.append(Problem(what, "", "Leave launch.agents out."))
        problems += setup.find_setup_problems(self.setup)
        gpus, ranks = self.count_gpus_per_node(run), self.count_ranks_of_node(run)
        if 0 < gpus < ranks:
            world = self.count_ranks(run)
            what = f"launch.nodes={self.nodes}: {world} processes are {ranks} a node, which has {gpus} GPUs."
            mend = f"launch.processes={gpus * self.count_max_nodes()}, or more nodes."
            problems.append(Problem(what, "Each process takes a GPU of its own.", mend))
        return problems
