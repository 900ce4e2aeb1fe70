"""Hang timeouts of phases, learned from the durations of the phases on all ranks of a machine. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.pulse.layout import PHASES, compute_upper
from gangline_health.hangs.config import HangsOptions
from gangline_health.pulses import Seen

ENOUGH = 8  # minimum occurrences of a phase, over all ranks of the machine, to learn its timeout
NEVER = ("end",)  # phases without a hang timeout, because no rank waits for a rank in them
# Phases whose duration depends on a disk, a callback or a validation set, and sometimes is far longer than usual.
QUIET = ("start", "build", "restore", "between", "callback", "validate", "save", "checkpoint", "recovery")


def estimate_percentile(histogram: list[int], share: float) -> float:
    """Return a percentile (`share`, 0 to 1) of the durations in a histogram, in seconds; at most a quarter too high."""
    total, running_sum = sum(histogram), 0
    for number, count in enumerate(histogram):
        running_sum += count
        if running_sum >= share * total:
            return compute_upper(number) * 1e-9
    return 0.0


def learn_limits(ranks: Iterable[Seen], options: HangsOptions) -> dict[str, float]:
    """Return the hang timeout in seconds of each phase with at least `ENOUGH` measured durations.

    Histograms of ranks leave out the first steps of a start, and are empty when a start begins.
    """
    limits = {}
    every = list(ranks)
    for phase in PHASES:
        together = [sum(counts) for counts in zip(*(pulse.lasted[phase] for pulse in every), strict=True)]
        if sum(together) >= ENOUGH:
            floor = options.quiet_seconds if phase in QUIET else options.floor_seconds
            limits[phase] = max(floor, options.factor * estimate_percentile(together, 0.99))
    return limits


def get_limit(phase: str, known: dict[str, float], options: HangsOptions) -> float:
    """Return the hang timeout of a phase in seconds: learned, else `unlearned_seconds`; infinite if in `NEVER`."""
    return float("inf") if phase in NEVER else known.get(phase, options.unlearned_seconds)
