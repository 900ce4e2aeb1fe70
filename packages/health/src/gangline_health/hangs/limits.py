"""Time limits of phases, learned from the durations that ranks measured. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable

from gangline.pulse.layout import PHASES, compute_upper
from gangline_health.hangs.config import HangsOptions
from gangline_health.pulses import Seen

ENOUGH = 8  # occurrences of a phase, over all ranks of the machine, before it has a limit of its own
NEVER = ("end",)  # phases in which other ranks do not wait for a rank
# Phases that last as long as a disk, a callback or a validation set takes, and sometimes far longer.
QUIET = ("start", "build", "restore", "between", "callback", "validate", "save", "checkpoint", "recovery")


def estimate_percentile(histogram: list[int], share: float) -> float:
    """Return the seconds below which this share of the phases stayed; at most a quarter above the true value."""
    total, running_sum = sum(histogram), 0
    for number, count in enumerate(histogram):
        running_sum += count
        if running_sum >= share * total:
            return compute_upper(number) * 1e-9
    return 0.0


def learn_limits(ranks: Iterable[Seen], options: HangsOptions) -> dict[str, float]:
    """Return the hang limit in seconds of each phase that was seen often enough.

    The ranks leave out their first steps, and count from zero at each start.
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
    """Return the seconds that a rank may stay in a phase."""
    return float("inf") if phase in NEVER else known.get(phase, options.unlearned_seconds)
