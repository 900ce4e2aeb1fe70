"""Figure of layouts by step time and memory, with the Pareto front marked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline_basics.figure import INK, PALE, PALETTE, add_legend, add_tip, make_subplots, use_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Layout = tuple[float, float, str]  # (seconds of a step, gigabytes of the fullest rank, overrides)


@use_style()
def draw_front(title: str, layouts: Sequence[Layout], front: Sequence[Layout], limit: float) -> Figure:
    """Return a figure of step time against memory. front: the Pareto front; limit: accelerator memory in GB."""
    figure, (axes,) = make_subplots(title, "each dot is a layout; hover over a dot to see its overrides", heights=[4])
    groups = (
        ("other planned layouts", PALE, layouts),
        ("Pareto front: no layout is both faster and smaller", PALETTE[6], front),
    )
    for label, colour, group in groups:
        for place, (seconds, gigabytes, words) in enumerate(group):
            (dot,) = axes.plot(seconds, gigabytes, "o", color=colour, markeredgecolor=INK, markeredgewidth=0.5)
            dot.set_label("" if place else label)
            add_tip(dot, f"{seconds:.4g} s, {gigabytes:.4g} GB: {words}")
    axes.axhline(limit, color=INK, label="memory of an accelerator")
    axes.set(xlabel="step time in seconds", ylabel="memory of the fullest rank in GB", ylim=(0, None))
    add_legend(axes, below=3)
    return figure
