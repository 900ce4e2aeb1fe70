"""Simulation of the goodput of a run with failures, by an installed part of the group `simulator`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, sqrt
from statistics import mean

from gangline.explain.reliability import DAY, GROUP, SimulatedJob, build_simulator
from gangline.plugin.registry import installed
from gangline_planner.forecast import Forecast

DAYS = 30.0  # simulated days if the number of tokens is unknown
COURSES = 5  # number of simulations of a job, each with its own seed
REPAIR = DAY  # seconds to repair a node; the job has so many spare nodes that one is almost always available
MOST = 1e5  # maximum expected number of failures, over all simulations of a job


@dataclass(frozen=True)
class SimulatedGoodput:
    """Goodput and failures of a job, as means over several simulations.

    by     the simulator, as an override
    days   simulated days of each simulation
    spares number of spare nodes
    """

    by: str
    days: float
    goodput: float
    failures: float
    spares: int
    shares: dict[str, float]  # kind of time -> share of the simulated time

    def to_dict(self) -> dict[str, object]:
        return {
            "by": self.by,
            "days": self.days,
            "goodput": self.goodput,
            "failures": self.failures,
            "shares": self.shares,
        }


def simulate_goodput(plan: Forecast) -> SimulatedGoodput | None:
    """Return the simulated goodput of a run; None without a simulator, or with an unknown or too high failure rate."""
    offers, reliability = installed().get_offers(GROUP), plan.reliability
    if not offers or reliability is None or plan.save_every is None:
        return None
    days = plan.days or DAYS
    if days * DAY / reliability.mtbf_seconds * COURSES > MOST:
        return None
    name = min(offers)
    plays = build_simulator(name)
    repaired = REPAIR / reliability.mtbf_seconds  # mean number of nodes in repair at a time
    nodes = ceil(plan.world / plan.explained.topology.gpus_per_node)
    job = SimulatedJob(
        nodes=nodes,
        days=days,
        faults_per_node_day=DAY / reliability.mtbf_seconds / nodes,
        save_seconds=reliability.save_seconds,
        checkpoint_seconds=plan.save_every,
        detection_seconds=0.0,  # `restart.seconds` of the cluster file includes detection
        restart_seconds=reliability.recovery_seconds,
        repair_seconds=REPAIR,
        spares=ceil(repaired + 3 * sqrt(repaired)),
    )
    courses = [plays.simulate(replace(job, seed=seed)) for seed in range(COURSES)]
    kinds = dict.fromkeys(kind for one in courses for kind in one.seconds)
    return SimulatedGoodput(
        by=f"simulator={name}",
        days=days,
        goodput=mean(one.ettr for one in courses),
        failures=mean(one.faults for one in courses),
        spares=job.spares,
        shares={kind: mean(one.seconds.get(kind, 0.0) / one.wall_seconds for one in courses) for kind in kinds},
    )


def format_goodput(found: SimulatedGoodput) -> str:
    """Return the simulated goodput as a line of text."""
    shares = sorted(((share, kind) for kind, share in found.shares.items() if share >= 5e-5), reverse=True)
    breakdown = ", ".join(f"{kind.replace('_', ' ')} {share:.2%}" for share, kind in shares)
    return (
        f"{found.by}: {found.days:.3g} days with {found.failures:.4g} failures and {found.spares} spare nodes "
        f"(each repair takes {REPAIR / DAY:g} day), "
        f"goodput {found.goodput:.1%} ({breakdown})"
    )
