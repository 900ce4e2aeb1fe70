"""Options of `health=chaos`, fault injection. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

from gangline import Part, Problem
from gangline.config import HealthConfig, NonNegativeInt, OneOf, PositiveFloat, PositiveInt
from gangline_health.chaos.plan import ANYWHERE, IN_COLLECTIVES, KINDS, parse

if TYPE_CHECKING:
    from gangline.comm.base import Comms
    from gangline.config import Run

Kind = Annotated[str, OneOf(KINDS)]


@dataclass
class ChaosHealth(HealthConfig):
    """Fault injection, at random from a seed or from a list; every injected fault is logged in events.jsonl."""

    faults: NonNegativeInt = 0  # number of random faults
    seconds: PositiveFloat = 900.0  # time window of the random faults, in seconds from the first start of the run
    seed: NonNegativeInt = 0  # seed of the kinds, times and ranks of random faults
    kinds: list[Kind] = field(default_factory=lambda: list(ANYWHERE))  # kinds of fault to draw random faults from
    at: list[str] = field(default_factory=list)  # faults at given steps, each as kind@step or kind@step:rank
    slow_seconds: PositiveFloat = 0.5  # fault slow: delay of each step of the rank, in seconds
    slow_steps: NonNegativeInt = 50  # fault slow: number of steps that are delayed
    full_steps: PositiveInt = 10  # fault disk-full: number of steps during which writes fail
    store_seconds: PositiveFloat = 2.0  # fault lost-store: duration of the outage of the store, in seconds

    def check(self, run: Run) -> list[Problem]:
        """Return problems: no fault, a malformed entry of `at`, or faults that need several ranks in a run of one."""
        from gangline.config.check import count_ranks

        problems = []
        if not self.faults and not self.at:
            problems.append(
                Problem(
                    "health=chaos injects faults, but no fault is configured.",
                    "Set a number of random faults, or list faults with their steps.",
                    "health.chaos.faults=8 health.chaos.seconds=120, or 'health.chaos.at=[kill@100:1]', "
                    "or omit chaos from health=[...]",
                )
            )
        kinds = set(self.kinds if self.faults else ())
        for words in self.at:
            try:
                kinds.add(parse(words)[0])
            except ValueError as error:
                problems.append(Problem(f"health.chaos.at: {error}.", f"Kinds: {', '.join(KINDS)}", "kill@100:1"))
        without = [kind for kind in IN_COLLECTIVES if kind in kinds]
        if without and count_ranks(run) == 1:
            problems.append(
                Problem(
                    f"health=chaos cannot inject {', '.join(without)} into a run of one process.",
                    "These faults act in collectives of the forward and backward pass.",
                    "parallel=ddp launch.processes=2, or other kinds: health.chaos.kinds, health.chaos.at",
                )
            )
        return problems

    def list_notices(self, run: Run) -> list[str]:
        many = f"{self.faults} random faults within {self.seconds:g} s" if self.faults else ""
        fault_list = ", ".join(self.at)
        return [f"health=chaos injects faults into this run: {'; '.join(filter(None, (many, fault_list)))}"]

    def wrap(self, run: Run, comms: Comms) -> Comms:
        from gangline_health.chaos.traffic import break_comms

        return break_comms(self, run, comms)


PART = Part(
    name="chaos",
    config=ChaosHealth,
    build="gangline_health.chaos.check:ChaosCheck",
    summary="fault injection: killed, stopped, slow and hung ranks, wrong numbers, a full disk, a lost store",
)
