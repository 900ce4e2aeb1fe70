"""Load of experts: a heat map of layers and experts, from the metrics `LAYER/load` of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element

import numpy as np

from gangline.errors import escape_controls
from gangline_basics.figure import INK, PALE, make_subplots, use_integer_ticks, use_style
from gangline_basics.runs.report.figures import WIDTH, render_svg
from gangline_basics.runs.report.history import History
from gangline_basics.runs.report.markup import make, make_details, make_section, make_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LOAD = "/load"
MOST_LAYERS, MOST_EXPERTS = 32, 48  # maximum number of rows and columns of the heat map
MOST_SHARE = 2.0  # load / mean load at the upper end of the colour scale


def show_experts(history: History) -> Element | None:
    """Return the section of the experts' load; None for a run without experts."""
    loads = {
        name.removesuffix(LOAD): load for name, load in history.lists.items() if name.endswith(LOAD) and sum(load) > 0
    }
    if not loads:
        return None
    shares = {layer: [value * len(load) / sum(load) for value in load] for layer, load in loads.items()}
    rows = []
    for layer, row in shares.items():
        idle = ", ".join(str(expert) for expert, share in enumerate(row) if share == 0)
        rows.append((layer, str(len(row)), f"{max(row):.2f}", f"{min(row):.2f}", idle or "none"))
    caption = f"Load of {len(rows)} layers, averaged over the last tenth of the steps; "
    caption += f"largest load / mean load {max(max(row) for row in shares.values()):.2f}."
    table = make_table(("layer", "experts", "max / mean", "min / mean", "without tokens"), rows, (1, 2, 3))
    figure = render_svg(draw_load(shares), caption + describe_bins(shares))
    return make_section("Experts", make("div", figure, make_details("By layer", table, opened=True), class_="figures"))


@use_style()
def draw_load(shares: dict[str, list[float]]) -> Figure:
    """Return the heat map; each cell is the load of an expert divided by the mean load of its layer."""
    from matplotlib import colormaps

    layers = list(shares)
    width = max(map(len, shares.values()))
    padded = np.array([row + [np.nan] * (width - len(row)) for row in shares.values()])
    rows, columns = _list_edges(len(layers), MOST_LAYERS), _list_edges(width, MOST_EXPERTS)
    cells = _take_extremes(padded, rows, columns)
    heights = [max(0.8, 0.2 * len(cells)), 0.12]
    figure, (axes, scale) = make_subplots("Load of experts", heights=heights, width=WIDTH)
    colours = colormaps["RdBu_r"].with_extremes(bad=PALE)
    edges = (np.array(columns) - 0.5, np.array(rows) - 0.5)
    axes.pcolormesh(*edges, np.ma.masked_invalid(cells), cmap=colours, vmin=0, vmax=MOST_SHARE)
    axes.set(xlabel="expert", ylabel="layer")
    axes.set_yticks(rows[:-1], [escape_controls(layers[start])[:24] for start in rows[:-1]])
    axes.invert_yaxis()
    axes.grid(False)
    use_integer_ticks(axes.xaxis)
    steps = np.linspace(0, MOST_SHARE, 17)
    scale.pcolormesh(steps, [0, 1], [(steps[:-1] + steps[1:]) / 2], cmap=colours, vmin=0, vmax=MOST_SHARE)
    scale.set(xlabel=f"load / mean load of the layer ({MOST_SHARE:g} or more: darkest red)", yticks=[])
    scale.spines[:].set_edgecolor(INK)
    scale.grid(False)
    return figure


def describe_bins(shares: dict[str, list[float]]) -> str:
    """Return a sentence if a cell of the heat map covers several layers or experts."""
    width = max(map(len, shares.values()))
    if len(shares) <= MOST_LAYERS and width <= MOST_EXPERTS:
        return ""
    return (
        f" {len(shares)} layers and {width} experts are drawn as at most {MOST_LAYERS} rows and {MOST_EXPERTS} columns;"
        " a cell shows the value of its layers and experts that is farthest from 1."
    )


def _list_edges(size: int, most: int) -> list[int]:
    count = min(size, most)
    return [size * place // count for place in range(count + 1)]


def _take_extremes(values: Any, rows: list[int], columns: list[int]) -> Any:
    """Return a table with the value farthest from 1 of each cell; NaN for a cell without a value."""
    table = np.full((len(rows) - 1, len(columns) - 1), np.nan)
    for row in range(len(rows) - 1):
        for column in range(len(columns) - 1):
            cell = values[rows[row] : rows[row + 1], columns[column] : columns[column + 1]]
            finite = cell[np.isfinite(cell)]
            if len(finite):
                table[row, column] = finite[np.abs(finite - 1).argmax()]
    return table
