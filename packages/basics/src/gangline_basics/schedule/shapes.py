"""Learning rate schedules, as functions of the index of a step, from 0. Torch-free."""

from __future__ import annotations

import math
from collections.abc import Callable

from gangline.config.schema import Run
from gangline_basics.schedule.config import Constant, Cosine, Wsd

Schedule = Callable[[int], float]


def warm_up(warmup_steps: int, then: Schedule) -> Schedule:
    """Return a linear warm-up to the peak learning rate, reached at step index `warmup_steps`, followed by `then`."""
    return lambda step: (step + 1) / (warmup_steps + 1) if step < warmup_steps else then(step)


def build_constant(config: Constant, run: Run) -> Schedule:
    """Return the schedule `constant`."""
    return warm_up(config.count_warmup_steps(run), lambda step: 1.0)


def build_cosine(config: Cosine, run: Run) -> Schedule:
    """Return the schedule `cosine`: `final` is reached as the last step ends."""
    warmup = config.count_warmup_steps(run)
    length = max(run.steps - warmup, 1)

    def fall(step: int) -> float:
        progress = min((step - warmup) / length, 1.0)
        return config.final + (1 - config.final) * (1 + math.cos(math.pi * progress)) / 2

    return warm_up(warmup, fall)


def build_wsd(config: Wsd, run: Run) -> Schedule:
    """Return the schedule `wsd`: it decays over the last `decay_steps` steps, to `final` as the last step ends."""
    length = config.count_decay_steps(run)
    first = run.steps - length

    def fall(step: int) -> float:
        progress = 0.0 if step < first else min((step - first) / max(length, 1), 1.0)
        return 1.0 - (1.0 - config.final) * progress

    return warm_up(config.count_warmup_steps(run), fall)
