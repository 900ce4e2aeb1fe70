"""Figure of a plan: step time by kind, memory of each pipeline rank, and timeline of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gangline_basics.explain.timeline import StepTimeline
from gangline_basics.figure import INK, PALE, add_bars, add_legend, make_subplots, use_integer_ticks, use_style
from gangline_planner.forecast import Forecast
from gangline_planner.pictures.colours import ACTION_WORDS, ACTIONS, get_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 0.18  # height of a bar in inches
VECTORS = 2000  # maximum number of actions to draw as vectors; more actions are rasterized


@use_style()
def draw_plan(plan: Forecast) -> Figure:
    """Return a figure of step time, memory and, with several pipeline ranks, the timeline, one below the other."""
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.explained.mesh.sizes if size > 1) or "one rank"
    about = f"{axes}; MFU {plan.mfu:.1%}, {plan.tokens_per_second:,.0f} tokens per second"
    title = f"A step of {plan.world} ranks of {plan.cluster.name}: {plan.step.seconds:.4g} s"
    kinds = {kind: seconds for kind, seconds in plan.step.kinds.items() if seconds > 1e-9}
    ranks = [rank.bytes for rank in plan.explained.ranks]
    high = ROW * max(len(ranks), 9)
    heights = [ROW * len(kinds), high, high][: 3 if len(ranks) > 1 else 2]
    figure, (step, memory, *timeline) = make_subplots(title, about, heights)
    add_bars(step, kinds, [get_colour(place) for place in range(len(kinds))])
    step.set(xlabel="step time in seconds")
    _draw_memory(memory, ranks, plan.cluster["memory.bytes"])
    for plot in timeline:
        _draw_timeline(plot, plan.step.timeline)
    return figure


def _draw_memory(axes: Axes, ranks: Sequence[Mapping[str, int]], limit: float) -> None:
    begins = [0.0] * len(ranks)
    for place, kind in enumerate(dict.fromkeys(kind for memory in ranks for kind, size in memory.items() if size)):
        sizes = [memory.get(kind, 0) / 1e9 for memory in ranks]
        axes.barh(range(len(ranks)), sizes, left=begins, color=get_colour(place), label=kind)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    axes.axvline(limit / 1e9, color=INK, label="accelerator")
    axes.set(xlabel="memory in GB")
    _set_rank_axis(axes, len(ranks))


def _draw_timeline(axes: Axes, timeline: StepTimeline) -> None:
    ranks = range(len(timeline.spans))
    image = sum(map(len, timeline.spans)) > VECTORS
    axes.barh(ranks, timeline.makespan, color=PALE, label="waits")
    for kind, label in ACTION_WORDS.items():
        for rank, spans in enumerate(timeline.spans):
            times = [(start, end - start) for action, start, end in spans if action.kind == kind]
            if times:
                axes.broken_barh(times, (rank - 0.4, 0.8), color=ACTIONS[kind], label=label, rasterized=image)
                label = ""
    axes.set(xlabel="time of forward and backward passes in seconds", xlim=(0, timeline.makespan))
    _set_rank_axis(axes, len(ranks))


def _set_rank_axis(axes: Axes, ranks: int) -> None:
    axes.set(ylabel="pipeline rank", ylim=(ranks - 0.5, -0.5))
    use_integer_ticks(axes.yaxis)
    axes.yaxis.grid(False)
    add_legend(axes)
