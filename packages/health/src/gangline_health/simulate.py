"""A discrete-event simulation of a long job: faults, saves, detection, restarts, spares, repairs. Torch-free.

Between two events everything is known, so the course jumps from event to event: a fault (drawn from the exponential
distribution of all nodes together), the end of a recovery, a node that comes back from repair.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass

from gangline import Part
from gangline.config import SimulatorConfig
from gangline.explain.reliability import FailureSimulator, SimulatedJob, SimulatedTime
from gangline_health.ledger.spans import KINDS


@dataclass
class EventSimulation(SimulatorConfig):
    """Faults of all nodes together, drawn from the exponential distribution."""


PART = Part(
    name="events",
    config=EventSimulation,
    build="gangline_health.simulate:build",
    summary="faults, saves, spares and repairs of a long job, from event to event",
)


def build(config: EventSimulation) -> FailureSimulator:
    """The part `simulator=events`."""
    return EventSimulator()


class EventSimulator(FailureSimulator):
    """Faults come while the job trains and while it recovers, not while it waits for nodes."""

    def simulate(self, job: SimulatedJob) -> SimulatedTime:
        draw = random.Random(job.seed)
        mean, wall, every = job.reliability.mtbf_seconds, job.days * 86400.0, job.every
        seconds = dict.fromkeys(KINDS, 0.0)
        repairs: list[float] = []  # when nodes come back
        now, spares, fewest, faults = 0.0, job.spares, job.spares, 0

        def spend(kind: str, length: float) -> float:
            """As much of it as is left of the job's time; what was spent."""
            nonlocal now
            length = min(length, wall - now)
            seconds[kind] += length
            now += length
            return length

        recovering = False
        while now < wall:
            fault = draw.expovariate(1.0 / mean)  # from here on
            if recovering:
                recovery = job.detection_seconds + job.restart_seconds
                detected = spend("detection", min(fault, job.detection_seconds))
                spend("recovery", min(fault, recovery) - detected)
                recovering, fault = fault < recovery, fault - recovery
            if not recovering:
                time_left = wall - now
                stretches, rest = divmod(min(fault, time_left), every + job.save_seconds)
                spend("compute", stretches * every)
                spend("checkpoint_stall", stretches * job.save_seconds)
                spend("lost_work" if fault < time_left else "compute", rest)  # what ends by its time has lost nothing
            if now >= wall:
                break
            faults, recovering = faults + 1, True
            heapq.heappush(repairs, now + job.repair_seconds)
            while repairs and repairs[0] <= now:
                heapq.heappop(repairs)
                spares += 1
            if spares == 0:
                spend("idle", heapq.heappop(repairs) - now)
                spares = 1
            spares -= 1
            fewest = min(fewest, spares)
        return SimulatedTime(wall_seconds=wall, seconds=seconds, faults=faults, fewest_spares=fewest)
