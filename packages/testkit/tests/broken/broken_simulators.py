"""Simulators of failures that are wrong in one way each."""

from __future__ import annotations

import random
from dataclasses import replace

from gangline_testkit.examples.expected import ClosedForm


class Broken(ClosedForm):
    def __init__(self, config):
        pass


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
    """Redoes no step."""

    def simulate(self, job):
        found = super().simulate(job)
        steps = found.wall_seconds - found.seconds["checkpoint_stall"]
        return replace(found, seconds={**found.seconds, "compute": steps, "recovery": 0.0})


class Unshaken(Broken):
    """Knows one rate of faults."""

    def simulate(self, job):
        usual = type(job)(nodes=job.nodes, days=job.days).faults_per_node_day
        found = super().simulate(replace(job, faults_per_node_day=usual))
        return replace(found, faults=round(found.wall_seconds / job.reliability.mtbf_seconds))
