"""Failures of a long run in closed forms, and what a simulator of them is given and gives. Torch-free.

Faults come independently, with the same mean time between them all along (a Poisson process). The optimal interval is
Young's (CACM 17, 1974) with Daly's first correction (FGCS 22, 2006, eq. 37); the expected time of a stretch between two
saves, with faults also while the run recovers, is Daly's complete one (eq. 20). ETTR is the effective training time
ratio: time in steps that stand over all time (arXiv 2410.21680, section 5).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field

GROUP = "simulator"
DAY = 86400.0


@dataclass(frozen=True)
class Reliability:
    """A run as a whole; seconds throughout.

    mtbf_seconds      mean time between faults of the run, not of a node
    save_seconds      that a save holds training up
    recovery_seconds  from a fault until steps are done again: detection, restart, restore
    """

    mtbf_seconds: float
    save_seconds: float
    recovery_seconds: float

    @classmethod
    def of_nodes(cls, nodes: int, faults_per_node_day: float, save_seconds: float, recovery: float) -> Reliability:
        """Any fault of any node interrupts the run."""
        return cls(DAY / (nodes * faults_per_node_day), save_seconds, recovery)

    def compute_young_daly(self) -> float:
        """Seconds of training between two saves that lose the least; at least a save's own length.

        Where a save takes longer than twice the time between faults there is no optimum, and it is that time.
        """
        if self.save_seconds >= 2 * self.mtbf_seconds:
            return self.mtbf_seconds
        interval = math.sqrt(2 * self.save_seconds * self.mtbf_seconds) - self.save_seconds
        return max(interval, self.save_seconds, 1e-9)

    def compute_ettr(self, every: float) -> float:
        """Expected share of the time in steps that stand, saving after each `every` seconds of training."""
        stretch = (every + self.save_seconds) / self.mtbf_seconds
        whole = self.mtbf_seconds * math.exp(self.recovery_seconds / self.mtbf_seconds) * math.expm1(stretch)
        return every / whole


@dataclass(frozen=True, kw_only=True)
class SimulatedJob:
    """A job on `nodes` nodes, with spares that take the place of one that failed until it is repaired."""

    nodes: int
    days: float
    faults_per_node_day: float = 6.5e-3  # of Meta's RSC-1 (arXiv 2410.21680)
    save_seconds: float = 10.0
    checkpoint_seconds: float | None = None  # training between two saves; None: as Young and Daly say
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
        """Seconds of training between two saves."""
        return self.reliability.compute_young_daly() if self.checkpoint_seconds is None else self.checkpoint_seconds


@dataclass(frozen=True, kw_only=True)
class SimulatedTime:
    """Where the time of a simulated job went; `seconds` by kind sums up to `wall_seconds`."""

    wall_seconds: float
    seconds: dict[str, float] = field(default_factory=dict)
    faults: int = 0
    fewest_spares: int = 0

    @property
    def ettr(self) -> float:
        return self.seconds.get("compute", 0.0) / self.wall_seconds if self.wall_seconds else 0.0


class FailureSimulator(ABC):
    """Something that plays the course of a job."""

    @abstractmethod
    def simulate(self, job: SimulatedJob) -> SimulatedTime:
        """One course of the job: a function of `job` alone, its seed included."""


def build_simulator(name: str) -> FailureSimulator:
    """The simulator of that name, with its defaults. Raises UserError where it is not installed, with the choices."""
    from gangline.plugin import registry

    return registry.build(registry.installed().find(GROUP, name).part.config())


__all__ = ["DAY", "FailureSimulator", "Reliability", "SimulatedJob", "SimulatedTime", "build_simulator"]
