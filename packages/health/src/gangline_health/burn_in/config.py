"""Options of health=burn_in. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from gangline import Part, Problem, UserError
from gangline.config import HealthConfig, OneOf, PositiveFloat, PositiveInt, Run
from gangline_basics.cluster.file import load_cluster

Less = Annotated[float, Gt(0)]  # and less than 1


@dataclass
class BurnInHealth(HealthConfig):
    """Measures every rank before the first step, names those that are slow or wrong, and writes a cluster file."""

    seconds: PositiveFloat = 0.5  # for each measurement of a rank by itself
    repetitions: PositiveInt = 5  # of each transfer; the fastest counts
    pairs: PositiveInt = 16  # up to so many ranks, all pairs are measured; beyond, neighbours at growing distances
    matmul: Less = 0.15  # bad: products so much slower than the median rank's, as a share
    memory: Less = 0.25  # the same of copies in memory
    link: Less = 0.3  # the same of transfers to other ranks
    shared: PositiveFloat = 3.0  # ranks on a CPU take each other's cores: there the shares are so many times as large
    act: Annotated[str, OneOf(("stop", "warn"))] = "stop"  # what is done where a rank is bad
    base: str = "h100_ib"  # a cluster file for what is not measured

    def check(self, run: Run) -> list[Problem]:
        """Shares that no rank could be below, and a cluster that does not exist."""
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
