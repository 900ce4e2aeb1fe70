"""Reliability of a long run in closed forms, and the contract of simulators of failures. Torch-free.

Faults are independent, with a constant mean time between faults (a Poisson process). The optimal checkpoint interval
is Young's (CACM 17, 1974) with Daly's first correction (FGCS 22, 2006, eq. 37). The expected time between two saves,
with faults also during recovery, is Daly's complete model (eq. 20). ETTR is the effective training time ratio: time in
steps that are not lost, divided by all time (arXiv 2410.21680, section 5).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

GROUP = "simulator"
DAY = 86400.0


@dataclass(frozen=True)
class Reliability:
    """Fault rate of a run and its costs, in seconds.

    mtbf_seconds      mean time between faults of the run, not of a node
    save_seconds      time for which a save blocks training
    recovery_seconds  time from a fault to the next step: detection, restart, restore
    """

    mtbf_seconds: float
    save_seconds: float
    recovery_seconds: float

    @classmethod
    def of_nodes(cls, nodes: int, faults_per_node_day: float, save_seconds: float, recovery: float) -> Reliability:
        """Return the reliability of a run in which a fault of any node interrupts the run."""
        return cls(DAY / (nodes * faults_per_node_day), save_seconds, recovery)

    def compute_young_daly(self) -> float:
        """Return the training time between two saves, in seconds, that loses the least time; at least `save_seconds`.

        If a save takes at least twice the mean time between faults there is no optimum: return that mean time.
        """
        if self.save_seconds >= 2 * self.mtbf_seconds:
            return self.mtbf_seconds
        interval = math.sqrt(2 * self.save_seconds * self.mtbf_seconds) - self.save_seconds
        return max(interval, self.save_seconds, 1e-9)

    def compute_ettr(self, every: float) -> float:
        """Return the expected ETTR with a save every `every` seconds of training."""
        stretch = (every + self.save_seconds) / self.mtbf_seconds
        whole = self.mtbf_seconds * math.exp(self.recovery_seconds / self.mtbf_seconds) * math.expm1(stretch)
        return every / whole


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """Job on `nodes` nodes, with spare nodes that replace failed nodes until their repair."""

    nodes: int
    days: float
    faults_per_node_day: float = 6.5e-3  # fault rate of Meta's RSC-1 cluster (arXiv 2410.21680)
    save_seconds: float = 10.0
    checkpoint_seconds: float | None = None  # training time between two saves; None: optimum of Young and Daly
    detection_seconds: float = 10.0
    restart_seconds: float = 120.0
    spares: int = 8
    repair_seconds: float = DAY
    seed: int = 0

    @property
    def reliability(self) -> Reliability:
        recovery = self.detection_seconds + self.restart_seconds
        return Reliability.of_nodes(self.nodes, self.faults_per_node_day, self.save_seconds, recovery)

    @property
    def every(self) -> float:
        """Training time between two saves, in seconds."""
        return self.reliability.compute_young_daly() if self.checkpoint_seconds is None else self.checkpoint_seconds


@dataclass(frozen=True, kw_only=True)
class SimulatedTime:
    """Time of a simulated job; the sum of `seconds`, time by kind, is `wall_seconds`."""

    wall_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
    faults: int = 0
    fewest_spares: int = 0

    @property
    def ettr(self) -> float:
        return self.seconds.get("compute", 0.0) / self.wall_seconds if self.wall_seconds else 0.0


class FailureSimulator(ABC):
    """Contract of a simulator of a job's faults, saves, spare nodes and repairs."""

    @abstractmethod
    def simulate(self, job: SimulatedJob) -> SimulatedTime:
        """Simulate the job once. The result is a function of `job` only, including its seed."""


def build_simulator(name: str) -> FailureSimulator:
    """Build the simulator named `name` with its defaults. Raises UserError, with the choices, for an unknown name."""
    from gangline.plugin import registry

    return registry.build(registry.installed().find(GROUP, name).part.config())


__all__ = ["DAY", "FailureSimulator", "Reliability", "SimulatedJob", "SimulatedTime", "build_simulator"]
