"""Durations of the actions of a schedule: computed (`cost.timing`), measured, or uniform."""

from __future__ import annotations

from collections.abc import Sequence

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.actions import KINDS

UNIFORM = ActionTimes()


def expand_times(times: ActionTimes | Sequence[ActionTimes], stages: int) -> list[ActionTimes]:
    """Return the action times of each of `stages` stages, from one value for all stages or one value per stage.

    Raises ValueError if the list does not have `stages` values, or if an action takes no time: in a sort by end, it
    might then come before an action that it depends on.
    """
    each = [times] * stages if isinstance(times, ActionTimes) else list(times)
    if len(each) != stages:
        raise ValueError(f"got times of {len(each)} stages for a schedule of {stages} stages")
    if any(time.get_time(kind) <= 0 for time in each for kind in KINDS):
        raise ValueError("the time of every action must be more than 0")
    return each
