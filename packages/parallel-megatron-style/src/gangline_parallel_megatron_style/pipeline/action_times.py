"""Times of the actions of a schedule: computed (`cost.timing`), measured, or uniform."""

from __future__ import annotations

from collections.abc import Sequence

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.actions import KINDS

UNIFORM = ActionTimes()


def expand_times(times: ActionTimes | Sequence[ActionTimes], stages: int) -> list[ActionTimes]:
    """Return the times of each of `stages` stages, from one value for all stages or a list.

    Raises ValueError if the list has another length, and for an action that takes no time: sorted by end, an action
    might then come before an action that it depends on.
    """
    each = [times] * stages if isinstance(times, ActionTimes) else list(times)
    if len(each) != stages:
        raise ValueError(f"times of {len(each)} stages for a schedule of {stages}")
    if any(time.get_time(kind) <= 0 for time in each for kind in KINDS):
        raise ValueError("every action of a schedule takes some time")
    return each
