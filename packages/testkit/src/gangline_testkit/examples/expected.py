# gangline_expected.py: what failures cost on average, without a dice. gangline health simulate --simulator expected
from dataclasses import dataclass

from gangline import Part, hookimpl
from gangline_basics.explain.reliability import DAY, FailureSimulator, SimulatedTime, SimulatorConfig


@dataclass
class Expected(SimulatorConfig):
    pass


class ClosedForm(FailureSimulator):
    def simulate(self, job):
        wall = job.days * DAY
        steps = wall * job.reliability.ettr(job.every)
        saves = steps / job.every * job.save_seconds
        seconds = {"compute": steps, "checkpoint_stall": saves, "recovery": wall - steps - saves}
        faults = round(wall / job.reliability.mtbf_seconds)
        return SimulatedTime(wall_seconds=wall, seconds=seconds, faults=faults, fewest_spares=job.spares)


def build(config):
    return ClosedForm()


@hookimpl
def gangline_parts():
    about = {"name": "expected", "config": Expected, "build": "gangline_expected:build"}
    yield Part(group="simulator", summary="The mean of all courses, in closed form", **about)
