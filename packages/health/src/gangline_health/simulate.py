"""Discrete-event simulation of a long job: faults, saves, detection, restarts, spares, repairs. Torch-free.

The state changes only at events, so the simulation jumps from event to event: a fault (drawn from the exponential
distribution for all nodes together), the end of a recovery, a node that returns from repair.
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
    """Simulator of a job's faults, drawn from the exponential distribution for all nodes together."""


PART = Part(
    name="events",
    config=EventSimulation,
    build="gangline_health.simulate:build",
    summary="discrete-event simulation of faults, saves, spares and repairs of a long job",
)


def build(config: EventSimulation) -> FailureSimulator:
    """Build the part `simulator=events`."""
    return EventSimulator()


class EventSimulator(FailureSimulator):
    """Simulator in which faults occur while the job trains or recovers, but not while it waits for nodes."""

    def simulate(self, job: SimulatedJob) -> SimulatedTime:
        draw = random.Random(job.seed)
        mean, wall, every = job.reliability.mtbf_seconds, job.days * 86400.0, job.every
        seconds = dict.fromkeys(KINDS, 0.0)
        repairs: list[float] = []  # heap of the times at which nodes return from repair
        now, spares, fewest, faults = 0.0, job.spares, job.spares, 0

        def spend(kind: str, length: float) -> float:
            """Add `length` seconds to a kind of time, but not beyond the job's end; return the seconds added."""
            nonlocal now
            length = min(length, wall - now)
            seconds[kind] += length
            now += length
            return length

        recovering = False
        while now < wall:
            fault = draw.expovariate(1.0 / mean)  # seconds from now to the next fault
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
                spend("lost_work" if fault < time_left else "compute", rest)  # work at the end of the job is not lost
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
