"""Figures by matplotlib (the extra `pictures`) in one style. Equal data gives identical files.

    @use_style()
    def draw_loss(steps, losses):
        figure, (axes,) = make_subplots("Loss of runs/a", "steps 1 to 20", heights=[3])
        axes.plot(steps, losses, label="training")
        axes.set(xlabel="step", ylabel="loss (nats)")
        add_legend(axes)
        return figure

    write_figure(draw_loss(steps, losses), "loss.svg")

Figures have dark letters on white, which are legible on light pages, on dark pages and in print. PALETTE is by Okabe
and Ito ("Color Universal Design", 2008). matplotlib is imported only when a figure is drawn, without pyplot and without
a window. A notebook shows a figure that is the last expression of a cell.
"""

from __future__ import annotations

import io
import logging
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.errors import UserError
from gangline.storage.files import write_whole

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, PALE = "#1a1a1a", "#d9d9d9"  # colours of letters and axes; and of grid lines and missing data
PALETTE = ("#56b4e9", "#009e73", "#e69f00", "#f0e442", "#cc79a7", "#0072b2", "#d55e00")
WIDTH = 8.75  # default width in inches, 840 pixels in a browser
ROOM = 8.0  # preliminary height of titles and legends in inches; `render` measures them
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
    **dict.fromkeys(("axes.titlesize", "legend.fontsize", "xtick.labelsize", "ytick.labelsize"), 9),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon", "text.parse_math"), False),
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.prop_cycle": f"cycler('linestyle', ['-', '--', ':']) * cycler('color', {[*PALETTE[5:], *PALETTE[:5]]})",
    "axes.titlelocation": "left",
    "figure.constrained_layout.h_pad": 0.08,  # inches
    "figure.constrained_layout.hspace": 0.0,  # a fraction of the final height, which is unknown before `render`
    "figure.titlesize": 12,
    "figure.titleweight": "bold",
    "grid.color": PALE,
    "savefig.dpi": 144,
    "svg.fonttype": "none",  # write text as text, not as paths
    "svg.hashsalt": "gangline",
}


@contextmanager
def use_style() -> Iterator[None]:
    """Draw in the style of the project, overriding the user's matplotlibrc; also a decorator.

    Raises UserError if matplotlib is not installed.
    """
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # matplotlib warns if its cache folder is read-only
    try:
        import matplotlib
    except ImportError as error:
        raise UserError("figures need matplotlib.", "", 'pip install "gangline-basics[pictures]"') from error
    usual: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE}
    del usual["backend"]
    with matplotlib.rc_context(usual):
        yield


@use_style()
def make_subplots(
    title: str, about: str = "", heights: Sequence[float] = (3.5,), width: float = WIDTH, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """Return a figure, and its plots from top to bottom, one for each of `heights`. Lengths are in inches."""
    from matplotlib.figure import Figure

    figure = Figure((width, sum(heights) + ROOM + len(heights)), layout="constrained")
    figure.suptitle(textwrap.fill(title, int(8.3 * width)), x=0.01, ha="left")
    plots = figure.subplots(len(heights), sharex=sharex, squeeze=False, height_ratios=heights)[:, 0]
    plots[0].set_title("\n".join(textwrap.fill(line, int(13 * width)) for line in about.splitlines()))
    shown: Any = figure
    shown._ipython_display_ = partial(_show, figure)
    return figure, [*plots]


def add_legend(axes: Axes, below: int = 0, **options: Any) -> None:
    """Add a legend outside the data: right of the plot, or below all plots in `below` columns.

    Each entry of a legend on the right takes 0.19 inches of the height of the plot.
    """
    if below:
        axes.figure.legend(loc="outside lower left", ncols=below, **options)
    else:
        axes.legend(loc="upper left", bbox_to_anchor=(1, 1), **options)


def use_integer_ticks(*axes: Axis) -> None:
    """Use ticks only at integers, for axes of steps, ranks or layers."""
    for axis in axes:
        locator: Any = axis.get_major_locator()
        locator.set_params(integer=True)


def add_bars(axes: Axes, seconds: Mapping[str, float], colours: Sequence[str]) -> None:
    """Add a bar for each key of `seconds`, from top to bottom, labelled with its seconds and its share of the sum."""
    together = sum(seconds.values()) or 1.0
    bars = axes.barh([*seconds], [*seconds.values()], color=colours)
    shares = [f"{value:.4g} s, {value / together:.1%}" for value in seconds.values()]
    axes.bar_label(bars, shares, padding=4, fontsize=9)
    axes.margins(x=0.2)
    axes.grid(False)
    axes.invert_yaxis()


def add_tip(artist: Artist, text: str) -> None:
    """Add a tooltip, which a browser shows when the pointer is at the mark `artist` of a plot."""
    artist.set_gid(f"tip:{text}")
    artist.set_in_layout(False)  # the layout engine need not measure each mark


@use_style()
def render(figure: Figure, ending: str) -> bytes:
    """Return the content of an .svg or .png file. The plots get the heights passed to `make_subplots`."""
    layout: Any = figure.get_layout_engine()
    layout.execute(figure)
    grid: Any = figure.axes[0].get_gridspec()
    now = figure.get_figheight()
    plots = now * sum(axes.get_position().height for axes in figure.axes)
    figure.set_figheight(now - plots + sum(grid.get_height_ratios()))
    file = io.BytesIO()
    if ending == ".png":
        figure.savefig(file, format="png", metadata={"Software": None})
        return file.getvalue()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Title": figure.get_suptitle()})
    return re.sub(rb"<g id=([\"'])tip:(.*?)\1>", rb"<g><title>\2</title>", file.getvalue())


def _show(figure: Figure) -> None:
    """Show a figure in a notebook. IPython calls this function instead of matplotlib's, which ignores the heights."""
    from IPython.display import Image, display

    display(Image(data=render(figure, ".png"), format="png", width=round(96 * figure.get_figwidth())))


def write_figure(figure: Figure, path: str | Path, flag: str = "--svg", endings: Sequence[str] = (".svg",)) -> None:
    """Write a figure to a file atomically, in the format of its ending.

    Raises UserError, which names `flag`, for an ending that is not in `endings` and for a file that cannot be written.
    """
    path = Path(path)
    if path.suffix not in endings:
        raise UserError(f"{flag} {path} must end with {' or '.join(endings)}.")
    try:
        write_whole(path, render(figure, path.suffix))
    except OSError as error:
        fix = "" if path.parent.is_dir() else f"Create the directory:  mkdir -p {path.parent}"
        raise UserError(f"{flag} {path} cannot be written.", f"{error.strerror}.", fix) from error
