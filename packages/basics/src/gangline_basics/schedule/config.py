"""Configurations of the built-in schedules. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline.config.ranges import NonNegativeInt, Share
from gangline.config.schema import ScheduleConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class Constant(ScheduleConfig):
    """Warm-up, then a constant learning rate."""

    def check(self, run: Run) -> list[Problem]:
        if self.count_warmup_steps(run) > run.steps:
            what = f"schedule.warmup_steps={self.warmup_steps} exceeds run.steps={run.steps}."
            return [
                Problem(
                    what,
                    "",
                    f"schedule.warmup_steps={run.steps // 20}; or run.steps={20 * self.count_warmup_steps(run)}",
                )
            ]
        return []


@dataclass
class Cosine(Constant):
    """Warm-up, then half a cosine down to `final` at the end of the run (Loshchilov and Hutter, arXiv 1608.03983)."""

    final: Share = 0.1  # final learning rate, as a fraction of the peak learning rate


@dataclass
class Wsd(Constant):
    """Warm-up, constant learning rate, then a linear decay (MiniCPM, arXiv 2404.06395, section 4)."""

    decay_steps: NonNegativeInt | None = None  # number of learning rate decay steps; null: a tenth of the run
    final: Share = 0.0  # final learning rate, as a fraction of the peak learning rate

    def count_decay_steps(self, run: Run) -> int:
        """Return `decay_steps`; if None, a tenth of the run, at least 1 step, at most the steps after the warm-up."""
        if self.decay_steps is not None:
            return self.decay_steps
        return min(max(1, run.steps // 10), max(0, run.steps - self.count_warmup_steps(run)))

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if self.count_decay_steps(run) > max(0, run.steps - self.count_warmup_steps(run)):
            problems.append(
                Problem(
                    f"schedule.decay_steps={self.decay_steps} does not fit into run.steps={run.steps}.",
                    f"After {self.count_warmup_steps(run)} steps of warm-up, "
                    f"{run.steps - self.count_warmup_steps(run)} steps are left.",
                    f"schedule.decay_steps={max(0, run.steps - self.count_warmup_steps(run))}",
                )
            )
        return problems


PARTS = (
    Part(
        name="constant",
        config=Constant,
        build="gangline_basics.schedule.shapes:build_constant",
        summary="Warm-up, then a constant learning rate",
    ),
    Part(
        name="cosine",
        config=Cosine,
        build="gangline_basics.schedule.shapes:build_cosine",
        summary="Warm-up, then a cosine decay to the end of the run",
        default=True,
        synonyms={"final": "min_lr_ratio"},
    ),
    Part(
        name="wsd",
        config=Wsd,
        build="gangline_basics.schedule.shapes:build_wsd",
        summary="Warm-up, constant learning rate, then a linear decay over the last steps",
    ),
)
