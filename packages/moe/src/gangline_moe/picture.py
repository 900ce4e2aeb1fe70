"""Figures of the experts' load: over time with a plot per layer, and summed over steps with a row per layer.

Torch-free. The colours show an expert's load divided by the mean load of its layer: blue below 1, red above 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gangline_basics.figure import PALE, make_subplots, use_integer_ticks, use_style
from gangline_moe.load_history import StepLoads, compute_shares, list_layers, split_steps

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST = 2.0  # load / mean load at the upper end of the colour scale
SCALE = 0.12  # height of the colour scale in inches


@use_style()
def draw_over_time(steps: list[StepLoads], columns: int, run: str) -> Figure:
    """Return a figure with a plot per layer, experts down and steps across; each cell covers a range of steps."""
    parts, layers = split_steps(steps, columns), list_layers(steps)
    counts = {layer: len(load) for step in steps for layer, load in step.loads.items()}
    heights = [min(2.0, max(0.5, 0.12 * counts[layer])) for layer in layers]
    about = f"{_format_steps(steps)}; each cell covers {_format_lengths(parts)}"
    figure, (*plots, scale) = make_subplots(f"Load of the experts: {run}", about, [*heights, SCALE])
    for axes, layer in zip(plots, layers, strict=True):
        empty = [math.nan] * counts[layer]
        loads = [compute_shares(part, layer) if any(layer in step.loads for step in part) else empty for part in parts]
        image = _draw_cells(axes, list(zip(*loads, strict=True)))
        axes.set(ylabel="expert", xlabel="step" if axes is plots[-1] else "")
        axes.tick_params(labelbottom=axes is plots[-1])
        axes.xaxis.set_major_formatter(lambda at, _: str(parts[int(at)][-1].step) if 0 <= at < len(parts) else "")
        axes.annotate(layer, (1, 1), xycoords="axes fraction", ha="right", va="bottom")
    _draw_scale(scale, image)
    return figure


@use_style()
def draw_by_layer(steps: list[StepLoads], run: str) -> Figure:
    """Return a figure with layers down and experts across; each cell sums all of `steps`."""
    layers = list_layers(steps)
    heights = [max(0.8, 0.2 * len(layers)), SCALE]
    figure, (axes, scale) = make_subplots(f"Load of the experts: {run}", _format_steps(steps), heights)
    table = [compute_shares(steps, layer) for layer in layers]
    most = max(map(len, table))
    image = _draw_cells(axes, [row + [math.nan] * (most - len(row)) for row in table])
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_yticks(range(len(layers)), layers)
    _draw_scale(scale, image)
    return figure


def _draw_cells(axes: Axes, table: Sequence[Sequence[float]]) -> AxesImage:
    """Draw a row of cells for each row of `table`; NaN is a cell without a value."""
    from matplotlib import colormaps

    colours = colormaps["RdBu_r"].with_extremes(bad=PALE)
    axes.spines[:].set_visible(True)
    use_integer_ticks(axes.xaxis, axes.yaxis)
    axes.grid(False)
    return axes.imshow(table, colours, vmin=0, vmax=MOST, aspect="auto", interpolation="nearest")


def _draw_scale(axes: Axes, image: AxesImage) -> None:
    label = "load of an expert / mean load of its layer"
    axes.figure.colorbar(image, cax=axes, orientation="horizontal", label=label, extend="max")


def _format_steps(steps: Sequence[StepLoads]) -> str:
    first, last = steps[0].step, steps[-1].step
    return f"step {first}" if first == last else f"steps {first} to {last}"


def _format_lengths(parts: Sequence[Sequence[StepLoads]]) -> str:
    least, most = min(map(len, parts)), max(map(len, parts))
    if most == 1:
        return "one step"
    return f"{most} steps" if least == most else f"{least} or {most} steps"
