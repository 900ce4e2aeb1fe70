"""How long the actions of a schedule take: computed (`cost.timing`), measured, or all alike."""

from __future__ import annotations

from collections.abc import Sequence

from gangline_basics.explain.timeline import ActionTimes
from gangline_parallel_megatron_style.pipeline.actions import KINDS

UNIFORM = ActionTimes()


def expand_times(times: ActionTimes | Sequence[ActionTimes], stages: int) -> list[ActionTimes]:
    """The times of each stage, from those of every stage or a list.

    Raises ValueError where the list does not fit, and for an action that takes no time: in the order of their ends an
    action then need not come after what it needs.
    """
    each = [times] * stages if isinstance(times, ActionTimes) else list(times)
    if len(each) != stages:
        raise ValueError(f"times of {len(each)} stages for a schedule of {stages}")
    if any(time.get_time(kind) <= 0 for time in each for kind in KINDS):
        raise ValueError("every action of a schedule takes some time")
    return each
