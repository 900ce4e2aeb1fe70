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

    def test_factors_lie_between_nothing_and_one(self) -> None:
        """Check that factors are in [0, 1], also after the run's end, which a resume may move."""
        factor = self.build_factor()
        for step in range(2 * STEPS):
            assert 0 <= factor(step) <= 1, f"{factor(step)} at step {step}"
            assert math.isfinite(factor(step))

    def test_something_is_learnt(self) -> None:
        factor = self.build_factor()
        assert max(factor(step) for step in range(STEPS)) > 0.99, "the full rate is never reached"
        assert all(factor(step) > 0 for step in range(STEPS // 2))

    def test_pure(self) -> None:
        """Check that the factor depends on the step alone, since a resume starts in the middle."""
        one, two = self.build_factor(), self.build_factor()
        forwards = [one(step) for step in range(STEPS)]
        assert [two(step) for step in reversed(range(STEPS))] == forwards[::-1]
        assert [one(step) for step in range(STEPS)] == forwards

    def test_warm_up(self) -> None:
        """Check that factors rise from above 0 to 1 at step number `warmup_steps`."""
        factor = self.build_factor("schedule.warmup_steps=8")
        rise = [factor(step) for step in range(9)]
        assert rise == sorted(rise)
        assert 0 < rise[0] < rise[-1]
        assert math.isclose(rise[-1], 1.0)

    def test_builds_without_torch(self) -> None:
        process = subprocess.run(
            [sys.executable, "-c", _TORCH_FREE, *self.chosen, *self.settings],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ,
        )
        check_success(process)
        assert float(process.stdout) == self.build_factor("run.steps=20")(3)
