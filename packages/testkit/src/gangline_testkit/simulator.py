"""Conformance suite for simulators (group `simulator`): every second in one account, closed forms on average."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

from gangline.explain.reliability import FailureSimulator, SimulatedJob, SimulatedTime
from gangline_testkit.suite import PartSuite, check_success

COURSES = 20
JOBS = {
    "rare faults": SimulatedJob(nodes=128, days=300, save_seconds=60, restart_seconds=600, spares=99),
    "many faults": SimulatedJob(nodes=2048, days=54, save_seconds=5, restart_seconds=180, spares=999),
}

_TORCH_FREE = """
import sys
from gangline.explain.reliability import SimulatedJob, build_simulator
build_simulator(sys.argv[1]).simulate(SimulatedJob(nodes=8, days=1))
assert "torch" not in sys.modules, "torch is imported"
"""


class SimulatorSuite(PartSuite):
    """Conformance suite for simulators; subclass it with ``choice = "simulator=mine"``."""

    CLAIMS: ClassVar[dict[str, str]] = {}

    def build_simulator(self) -> FailureSimulator:
        return self.build(self.build_config(self.run()))

    def mean(self, job: SimulatedJob) -> tuple[float, float]:
        """Return (share of the time in steps that are not lost, faults), averaged over some courses."""
        courses = [self.build_simulator().simulate(replace(job, seed=seed)) for seed in range(COURSES)]
        return sum(one.ettr for one in courses) / COURSES, sum(one.faults for one in courses) / COURSES

    def test_every_second_is_in_one_account(self) -> None:
        for name, job in JOBS.items():
            course = self.build_simulator().simulate(job)
            assert math.isclose(course.wall_seconds, job.days * 86400.0), f"{name}: another length of time"
            total = sum(course.seconds.values())
            assert math.isclose(total, course.wall_seconds, rel_tol=1e-9), f"{name}: {total} s of {course.wall_seconds}"
            assert min(course.seconds.values()) >= 0, f"{name}: {course.seconds}"
            assert 0 <= course.fewest_spares <= job.spares, f"{name}: {course.fewest_spares} spares"

    def test_a_course_is_a_function_of_the_job(self) -> None:
        """Check that a job has one course, also after another job and with a new simulator."""
        one, job = self.build_simulator(), JOBS["rare faults"]
        first: SimulatedTime = one.simulate(job)
        one.simulate(JOBS["many faults"])
        assert one.simulate(job) == first, "another time it comes to something else"
        assert self.build_simulator().simulate(job) == first, "another one comes to something else"

    def test_on_average_it_comes_to_the_closed_form(self) -> None:
        """Check that with enough spares, ETTR is within 3 % and faults within 10 % of the closed form on average."""
        for name, job in JOBS.items():
            (ettr, faults), expected = self.mean(job), job.reliability.compute_ettr(job.every)
            assert math.isclose(ettr, expected, rel_tol=0.03), f"{name}: an ETTR of {ettr:.4f}, expected {expected:.4f}"
            number = job.days * 86400.0 / job.reliability.mtbf_seconds
            assert math.isclose(faults, number, rel_tol=0.1), f"{name}: {faults:g} faults, expected {number:.1f}"

    def test_more_faults_cost_more(self) -> None:
        job = JOBS["many faults"]
        usual, _ = self.mean(job)
        worse, _ = self.mean(replace(job, faults_per_node_day=4 * job.faults_per_node_day))
        assert worse < usual, f"an ETTR of {worse:.4f} with four times the faults, of {usual:.4f} else"

    def test_builds_without_torch(self) -> None:
        name = self.choice.partition("=")[2]
        command = [sys.executable, "-c", _TORCH_FREE, name]
        check_success(subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ))
