"""Options of `health=burn_in`, which measures all ranks before a run. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Gt

from gangline import Part, Problem, UserError
from gangline.config import HealthConfig, OneOf, PositiveFloat, PositiveInt, Run
from gangline_basics.cluster.file import load_cluster

Less = Annotated[float, Gt(0)]  # a share; `BurnInHealth.check` refuses values of 1 or more


@dataclass
class BurnInHealth(HealthConfig):
    """Burn-in: measures every rank before the first step, reports bad ranks and writes a cluster file."""

    seconds: PositiveFloat = 0.5  # duration of each matmul and memory measurement, in seconds
    repetitions: PositiveInt = 5  # number of repetitions of each measured transfer; the fastest repetition counts
    # maximum number of ranks to test every pair of ranks; with more ranks: pairs at distances 1, 2, 4, ...
    pairs: PositiveInt = 16
    matmul: Less = 0.15  # maximum shortfall of a rank's matmul throughput from the median rank, as a share
    memory: Less = 0.25  # maximum shortfall of a rank's memory bandwidth from the median rank, as a share
    link: Less = 0.3  # maximum shortfall of the bandwidth between ranks from its median, as a share
    # tolerance factor on CPU, where ranks share cores: multiplies the limits matmul, memory and link, up to 0.9
    shared: PositiveFloat = 3.0
    act: Annotated[str, OneOf(("stop", "warn"))] = "stop"  # action if a rank is bad
    base: str = "h100_ib"  # base cluster (name or file): values that burn-in does not measure

    def check(self, run: Run) -> list[Problem]:
        """Return problems: a share of 1 or more, or an invalid cluster file in `base`."""
        problems = [
            Problem(
                f"health.burn_in.{name}={getattr(self, name):g} must be less than 1.",
                "The value is a share of the median: 0.2 reports a rank that reaches less than 80 % of the median.",
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
    summary="burn-in before the first step: matmul, memory, links and exact sums of every rank",
)
