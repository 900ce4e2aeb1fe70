"""Figure of a ledger: a timeline of the run with its faults, and bars of the seconds by kind. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline_basics.figure import INK, PALE, WIDTH, add_bars, add_tip, make_subplots, use_style
from gangline_health.ledger.report import Ledger
from gangline_health.ledger.spans import KINDS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS = dict(
    zip(
        KINDS,
        (
            "#cc79a7", "#8c510a", "#e69f00", "#009e73", "#56b4e9", "#b8e186", "#0072b2", "#d55e00", "#f0e442",
            "#762a83", PALE,
        ),
        strict=True,
    )
)  # fmt: skip
ROW = 0.27  # height of a bar in inches
BINS = 700  # number of bins of the timeline, used if a span is too short to draw


def format_kind(kind: str) -> str:
    """Return the name of a kind of time with spaces instead of underscores."""
    return kind.replace("_", " ")


@use_style()
def draw_ledger(of: Ledger, width: float = WIDTH, title: str = "") -> Figure:
    """Return a figure: the timeline of the run with its faults below, and bars of seconds by kind, longest first.

    width: in inches. title: replaces the title, which names the run.
    """
    wall = of.wall_seconds or 1.0
    about = f"{wall:.1f} s, {len(of.faults)} faults, ETTR {of.ettr:.1%}"
    sums = {kind: sum_ for kind, sum_ in sorted(of.seconds.items(), key=lambda item: -item[1]) if sum_ > 0}
    heights = [0.8, ROW * max(3, len(sums))]
    figure, (time, below) = make_subplots(title or f"Where the time went: {of.run_dir}", about, heights, width)
    pieces = _lay_out(of)
    for kind in dict.fromkeys(kind for *_, kind in pieces):
        spans = [(begin * wall, (end - begin) * wall) for begin, end, name in pieces if name == kind]
        time.broken_barh(spans, (-0.4, 0.8), color=COLOURS[kind])
    for fault in of.faults:
        (mark,) = time.plot(fault.at, 1, "^", color=INK, clip_on=False)
        add_tip(mark, f"{fault.kind}: {fault.named}, detected after {fault.found:.2f} s")
    time.set(xlim=(0, wall), xlabel="seconds since the run began", ylim=(1.4, -0.5))
    time.set_yticks([0, 1], ["the run", "faults"])
    time.grid(False)
    add_bars(below, {format_kind(kind): sum_ for kind, sum_ in sums.items()}, [COLOURS[kind] for kind in sums])
    below.set(xlabel="seconds")
    return figure


def _lay_out(of: Ledger) -> list[tuple[float, float, str]]:
    """Return (begin, end, kind) of each span; begin and end are shares of the run's duration.

    If a span is too short to draw, returns bins of equal duration instead, each with the kind that fills most of it.
    """
    wall = of.wall_seconds or 1.0
    if all((part.end - part.begin) / wall * BINS > 2 for part in of.parts):
        return [(part.begin / wall, part.end / wall, part.kind) for part in of.parts]
    bins: list[dict[str, float]] = [{} for _ in range(BINS)]
    for part in of.parts:
        left, right = part.begin / wall * BINS, part.end / wall * BINS
        for n in range(int(left), min(int(right), BINS - 1) + 1):
            bins[n][part.kind] = bins[n].get(part.kind, 0.0) + min(right, n + 1) - max(left, n)
    pieces: list[tuple[float, float, str]] = []
    for n, shares in enumerate(bins):
        kind = max(shares, key=lambda kind: shares[kind], default="idle")
        begin = pieces.pop()[0] if pieces and pieces[-1][2] == kind else n / BINS
        pieces.append((begin, (n + 1) / BINS, kind))
    return pieces
