"""Conformance suite for schedules (group `schedule`): a factor in [0, 1], a pure function of the step, torch-free."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import ClassVar

from gangline_testkit.suite import PartSuite, check_success

STEPS = 50

_TORCH_FREE = """
import sys
from gangline.plugin import registry
from gangline_testkit.runs import build_small_run
run = build_small_run(*sys.argv[1:])
print(registry.build(run.schedule, run)(3))
assert "torch" not in sys.modules, "torch is imported"
"""


class ScheduleSuite(PartSuite):
    """Conformance suite for schedules; subclass it with ``choice = "schedule=mine"``."""

    CLAIMS: ClassVar[dict[str, str]] = {}

    def build_factor(self, *settings: str) -> Callable[[int], float]:
        run = self.run(f"run.steps={STEPS}", *settings)
        return self.build(run.schedule, run)

    def test_factors_are_between_0_and_1(self) -> None:
        """Check that factors are in [0, 1], also after the last step, because a resume may extend the run."""
        factor = self.build_factor()
        for step in range(2 * STEPS):
            assert 0 <= factor(step) <= 1, f"the factor is {factor(step)} at step {step}, outside [0, 1]"
            assert math.isfinite(factor(step))

    def test_factor_reaches_1_and_is_positive_in_the_first_half(self) -> None:
        factor = self.build_factor()
        assert max(factor(step) for step in range(STEPS)) > 0.99, (
            "the factor never exceeds 0.99: the peak learning rate is not reached"
        )
        assert all(factor(step) > 0 for step in range(STEPS // 2))

    def test_factor_depends_only_on_the_step(self) -> None:
        """Check that the factor depends only on the step, because a resume starts at any step."""
        one, two = self.build_factor(), self.build_factor()
        forwards = [one(step) for step in range(STEPS)]
        assert [two(step) for step in reversed(range(STEPS))] == forwards[::-1]
        assert [one(step) for step in range(STEPS)] == forwards

    def test_factor_rises_to_1_during_warmup(self) -> None:
        """Check that the factors rise during the warmup, from above 0 at step 0 to 1 at step `warmup_steps`."""
        factor = self.build_factor("schedule.warmup_steps=8")
        rise = [factor(step) for step in range(9)]
        assert rise == sorted(rise)
        assert 0 < rise[0] < rise[-1]
        assert math.isclose(rise[-1], 1.0)

    def test_schedule_is_built_without_torch(self) -> None:
        process = subprocess.run(
            [sys.executable, "-c", _TORCH_FREE, *self.chosen, *self.settings],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ,
        )
        check_success(process)
        assert float(process.stdout) == self.build_factor("run.steps=20")(3)
