"""Options of `health=burn_in`, measurements before a run. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from gangline import Part, Problem, UserError
from gangline.config import HealthConfig, OneOf, PositiveFloat, PositiveInt, Run
from gangline_basics.cluster.file import load_cluster

Less = Annotated[float, Gt(0)]  # a share; `BurnInHealth.check` demands less than 1


@dataclass
class BurnInHealth(HealthConfig):
    """Burn-in: measures every rank before the first step, names slow or wrong ranks, writes a cluster file."""

    seconds: PositiveFloat = 0.5  # time of each measurement of a single rank, in seconds
    repetitions: PositiveInt = 5  # number of repetitions of each transfer; the fastest counts
    pairs: PositiveInt = 16  # most ranks with a test of every pair; above, of neighbours at growing distances
    matmul: Less = 0.15  # threshold of slow matmuls, as a share below the median rank's rate
    memory: Less = 0.25  # threshold of slow memory copies, as a share below the median rank's rate
    link: Less = 0.3  # threshold of slow transfers to other ranks, as a share below the median rank's rate
    shared: PositiveFloat = 3.0  # CPU multiplier of the thresholds matmul, memory and link: CPU ranks compete for cores
    act: Annotated[str, OneOf(("stop", "warn"))] = "stop"  # action on a bad rank
    base: str = "h100_ib"  # cluster file for numbers that are not measured

    def check(self, run: Run) -> list[Problem]:
        """Return problems: a share that no rank can be below, or a cluster file that does not exist."""
        problems = [
            Problem(
                f"health.burn_in.{name}={getattr(self, name):g}: no rank can be slower by that share.",
                "It is less than 1: 0.2 finds a rank that reaches less than 80 % of the median.",
                f"health.burn_in.{name}=0.2",
            )
            for name in ("matmul", "memory", "link")
            if getattr(self, name) >= 1
        ]
        try:
            load_cluster(self.base)
        except UserError as error:
            problems.append(Problem(f"health.burn_in.base: {error.what}", *error.details))
        return problems


PART = Part(
    name="burn_in",
    config=BurnInHealth,
    build="gangline_health.burn_in.check:BurnInCheck",
    summary="every rank measured before the first step: products, memory, links, exact sums",
)
