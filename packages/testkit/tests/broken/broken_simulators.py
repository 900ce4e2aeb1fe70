"""Failure simulators with one fault each."""

from __future__ import annotations

import random
from dataclasses import replace

from gangline.explain.reliability import DAY, FailureSimulator, SimulatedTime


class Broken(FailureSimulator):
    """Returns the closed form; correct, and the base of the mutants below."""

    def __init__(self, config):
        pass

    def simulate(self, job):
        wall = job.days * DAY
        steps = wall * job.reliability.compute_ettr(job.every)
        saves = steps / job.every * job.save_seconds
        seconds = {"compute": steps, "checkpoint_stall": saves, "recovery": wall - steps - saves}
        faults = round(wall / job.reliability.mtbf_seconds)
        return SimulatedTime(wall_seconds=wall, seconds=seconds, faults=faults, fewest_spares=job.spares)


class LosesTime(Broken):
    def simulate(self, job):
        found = super().simulate(job)
        return replace(found, seconds={**found.seconds, "recovery": 0.0})


class RemembersItsDice(Broken):
    def __init__(self, config):
        self.dice = random.Random(0)

    def simulate(self, job):
        found = super().simulate(job)
        return replace(found, faults=found.faults + self.dice.choice((-1, 1)))


class Hopeful(Broken):
    """Counts no time for recovery and repeated steps."""

    def simulate(self, job):
        found = super().simulate(job)
        steps = found.wall_seconds - found.seconds["checkpoint_stall"]
        return replace(found, seconds={**found.seconds, "compute": steps, "recovery": 0.0})


class Unshaken(Broken):
    """Computes the time with the default failure rate, whatever rate the job has."""

    def simulate(self, job):
        usual = type(job)(nodes=job.nodes, days=job.days).faults_per_node_day
        found = super().simulate(replace(job, faults_per_node_day=usual))
        return replace(found, faults=round(found.wall_seconds / job.reliability.mtbf_seconds))
