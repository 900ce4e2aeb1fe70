"""Configuration of launchers, which start a run's processes. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from gangline.config.ranges import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from gangline.config.schema import LaunchConfig
from gangline.errors import Problem, UserError
from gangline.launch.detected import detect
from gangline.launch.devices import count_gpus
from gangline.plugin.parts import Part
from gangline_basics.launch.nodes import parse_nodes

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class LocalLaunch(LaunchConfig):
    """Processes on this machine, monitored by torch.distributed's elastic agent."""

    max_restarts: NonNegativeInt | None = 0  # maximum number of restarts after a rank failed; null: no limit
    # maximum number of consecutive restarts without a new step; restarts requested by health checks count too
    futile_restarts: NonNegativeInt = 5
    monitor_interval: PositiveFloat = 0.1  # interval between checks of the ranks, in seconds
    grace_seconds: NonNegativeFloat = 60.0  # grace period in seconds from SIGTERM or Ctrl-C to SIGKILL

    def get_seconds_to_stop(self) -> float | None:
        return self.grace_seconds

    def find_refusals(self, run: Run) -> list[Problem]:
        """Return a problem if the run needs more memory than the machine has."""
        from gangline_basics.launch.memory import find_memory_problems

        return find_memory_problems(run)

    def check(self, run: Run) -> list[Problem]:
        """Return a problem if there are more ranks than GPUs."""
        problems = []
        gpus, processes = count_gpus(run.job.device), self.processes or 0
        if 0 < gpus < processes:
            problems.append(
                Problem(
                    f"launch.processes={processes}: this machine has {gpus} GPU{'s' * (gpus > 1)}.",
                    "Each process needs its own GPU.",
                    f"launch.processes={gpus}, or run.device=cpu",
                )
            )
        return problems


@dataclass
class ElasticLaunch(LocalLaunch):
    """Elastic agents on several nodes, which rendezvous in the run directory; a job survives lost nodes."""

    shares: ClassVar[bool] = True

    nodes: str = "1"  # number of nodes, or minimum:maximum number of nodes for elastic training, such as 2:3
    agents: PositiveInt | None = None  # number of agents (one per node) to start on this machine; null: all
    per_node: PositiveInt | None = None  # processes per node; null: launch.processes / maximum node count, rounded up
    max_restarts: NonNegativeInt | None = None  # maximum number of restarts after a rank failed; null: no limit
    gather_seconds: PositiveFloat = 30.0  # maximum wait for nodes beyond the minimum, at the first start, in seconds
    # timeout in seconds for the minimum number of nodes to join; after the timeout, the job ends
    join_seconds: PositiveFloat = 600.0
    lost_seconds: Annotated[float, Ge(2)] = 4.0  # heartbeat timeout of a node, in seconds; checked once a second
    # duration in hours of a node exclusion by a health check; null: until the end of the run
    excluded_hours: PositiveFloat | None = 24.0

    def count_max_nodes(self) -> int:
        return parse_nodes(self.nodes)[1]

    def count_ranks_of_node(self, run: Run) -> int:
        """Return the number of processes of each node."""
        return self.per_node or -(-self.count_ranks(run) // self.count_max_nodes())

    def find_refusals(self, run: Run) -> list[Problem]:
        """Return the problems if no layout fits the number of processes of the minimum number of nodes."""
        from gangline_basics.launch.usable import find_usable

        if detect() is not None:
            return []
        fewest, _ = parse_nodes(self.nodes)
        ranks = min(self.count_ranks(run), fewest * self.count_ranks_of_node(run))
        usable_ranks, problems = find_usable(run, ranks)
        if usable_ranks:
            return []
        what = f"launch.nodes={self.nodes}: the minimum of {fewest} nodes has {ranks} processes, and no layout fits."
        return [Problem(what, "", "Raise the minimum number of nodes, or leave axes of parallel unset."), *problems]

    def check(self, run: Run) -> list[Problem]:
        """Return problems: an invalid number of nodes or agents, more ranks than GPUs, a missing run directory."""
        try:
            fewest, most = parse_nodes(self.nodes)
        except UserError as error:
            return [error.to_problem()]
        problems = []
        if self.agents is not None and self.agents > most:
            what = f"launch.agents={self.agents}: the job has at most {most} agents (launch.nodes={self.nodes})."
            problems.append(
                Problem(what, "", "launch.agents=1 on each node, or launch.agents=null to start all agents here.")
            )
        if self.agents is not None and self.agents < fewest and run.job.dir is None:
            problems.append(
                Problem(
                    f"launch.agents={self.agents}: the nodes cannot find each other without run.dir.",
                    "Nodes rendezvous in the run directory; without run.dir each node would create another directory.",
                    "Set the same run.dir=... on every node, on a shared file system.",
                )
            )
        here, ranks = count_gpus(run.job.device), self.count_ranks_of_node(run)
        if 0 < here < ranks * (self.agents or most):
            what = f"{ranks * (self.agents or most)} processes would start on this machine, which has {here} GPUs."
            problems.append(Problem(what, "Each process needs its own GPU.", "launch.agents=1, or launch.per_node=..."))
        return problems


PARTS = (
    Part(
        name="elastic",
        config=ElasticLaunch,
        build="gangline_basics.launch.several:ElasticLauncher",
        summary="processes on several nodes, with an elastic agent on each node; nodes may join and leave during a run",
    ),
    Part(
        name="local",
        config=LocalLaunch,
        default=True,
        capabilities={
            "rank": "gangline_basics.launch.under_agent:run_under_agent",
            "preparation": "gangline_basics.launch.forkserver:ForkServer",
        },
        build="gangline_basics.launch.local:LocalLauncher",
        summary="processes on this machine, forked from a server that has loaded torch",
    ),
)
