"""Conformance suite for failure simulators (group `simulator`): time accounts, determinism, closed-form averages."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from typing import ClassVar

from gangline.explain.reliability import FailureSimulator, SimulatedJob, SimulatedTime
from gangline_testkit.suite import PartSuite, check_success

COURSES = 20  # number of simulations per average, each with another seed
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
        """Return (ETTR, number of faults), averaged over simulations with `COURSES` seeds."""
        courses = [self.build_simulator().simulate(replace(job, seed=seed)) for seed in range(COURSES)]
        return sum(one.ettr for one in courses) / COURSES, sum(one.faults for one in courses) / COURSES

    def test_every_second_is_counted_once(self) -> None:
        for name, job in JOBS.items():
            course = self.build_simulator().simulate(job)
            assert math.isclose(course.wall_seconds, job.days * 86400.0), (
                f"{name}: wall_seconds is {course.wall_seconds}, expected {job.days} days"
            )
            total = sum(course.seconds.values())
            assert math.isclose(total, course.wall_seconds, rel_tol=1e-9), (
                f"{name}: the accounts sum to {total} s of {course.wall_seconds} s wall time"
            )
            assert min(course.seconds.values()) >= 0, f"{name}: an account has negative seconds: {course.seconds}"
            assert 0 <= course.fewest_spares <= job.spares, (
                f"{name}: fewest_spares is {course.fewest_spares}, outside [0, {job.spares}]"
            )

    def test_result_depends_only_on_the_job(self) -> None:
        """Check that a job has equal results when repeated, after another job, and with a new simulator."""
        one, job = self.build_simulator(), JOBS["rare faults"]
        first: SimulatedTime = one.simulate(job)
        one.simulate(JOBS["many faults"])
        assert one.simulate(job) == first, "the second simulation of a job has another result"
        assert self.build_simulator().simulate(job) == first, "a new simulator has another result for the same job"

    def test_average_matches_the_closed_form(self) -> None:
        """Check that with enough spares, ETTR is within 3 % and faults within 10 % of the closed form on average."""
        for name, job in JOBS.items():
            (ettr, faults), expected = self.mean(job), job.reliability.compute_ettr(job.every)
            assert math.isclose(ettr, expected, rel_tol=0.03), (
                f"{name}: the mean ETTR is {ettr:.4f}, expected {expected:.4f}"
            )
            number = job.days * 86400.0 / job.reliability.mtbf_seconds
            assert math.isclose(faults, number, rel_tol=0.1), (
                f"{name}: the mean number of faults is {faults:g}, expected {number:.1f}"
            )

    def test_more_faults_lower_the_ettr(self) -> None:
        job = JOBS["many faults"]
        usual, _ = self.mean(job)
        worse, _ = self.mean(replace(job, faults_per_node_day=4 * job.faults_per_node_day))
        assert worse < usual, f"ETTR is {worse:.4f} with four times the faults, not below {usual:.4f}"

    def test_simulator_is_built_without_torch(self) -> None:
        name = self.choice.partition("=")[2]
        command = [sys.executable, "-c", _TORCH_FREE, name]
        check_success(subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ))
