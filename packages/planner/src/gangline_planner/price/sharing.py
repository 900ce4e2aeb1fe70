"""Ranks that share cores: while some wait, those that compute have what these leave, up to `node.alone` times as much.

The rates of a cluster file are those of a rank while all of its node compute; where each has an accelerator of its own,
nobody has more than that.
"""

from __future__ import annotations

from gangline.explain import StepTimeline


def left(timeline: StepTimeline, alone: float) -> float:
    """What is left of a timeline's makespan, as a share of it.

    Of P pipeline ranks of which k compute, each has P / k of its rate, but no more than `alone`.
    """
    if alone <= 1.0 or timeline.makespan <= 0.0:
        return 1.0
    ranks = len(timeline.spans)
    changes = sorted(
        (moment, by) for spans in timeline.spans for _, start, end in spans for moment, by in ((start, 1), (end, -1))
    )
    seconds, before, busy = 0.0, 0.0, 0
    for moment, by in changes:
        seconds += (moment - before) / (min(alone, ranks / busy) if busy else 1.0)
        before, busy = moment, busy + by
    return seconds / timeline.makespan


def faster(timeline: StepTimeline, share: float) -> StepTimeline:
    """The same with every moment at this share of its time."""
    if share == 1.0:
        return timeline
    return StepTimeline(
        tuple(tuple((action, share * start, share * end) for action, start, end in spans) for spans in timeline.spans)
    )
