"""A ledger as a picture: the run from left to right with its faults, and what each kind sums up to. Torch-free."""

from __future__ import annotations

from gangline.figure import PALE, Figure, PlotArea
from gangline_health.ledger.report import Ledger
from gangline_health.ledger.spans import KINDS

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
WIDTH, LEFT, ROW = 900, 170, 26
BINS = 700  # pixels of the run, where some piece is narrower than that


def words(kind: str) -> str:
    """A kind as people write it."""
    return kind.replace("_", " ")


def picture(of: Ledger) -> Figure:
    """A timeline, the faults below it, and bars of seconds, the largest first."""
    wall = of.wall_seconds or 1.0
    about = f"{wall:.1f} s, {len(of.faults)} faults, {of.ettr:.1%} of the time in steps that stand"
    figure = Figure(f"Where the time went: {of.run_dir}", about, WIDTH)
    time = PlotArea(LEFT, figure.bottom + 10, WIDTH - LEFT - 30, 46)
    for left, right, kind in _drawn(of):
        tip = f"{words(kind)}: {left * wall:.2f} to {right * wall:.2f} s"
        figure.rect(
            time.left + left * time.width, time.top, (right - left) * time.width, time.height, COLOURS[kind], tip
        )
    for fault in of.faults:
        x = time.left + fault.at / wall * time.width
        tip = f"{fault.kind}: {fault.named}, found after {fault.found:.2f} s"
        figure.rect(min(x, time.right - 4), time.bottom + 4, 4, 12, "#1a1a1a", tip)
    figure.text(LEFT - 8, time.top + 28, "the run", anchor="end")
    figure.text(LEFT - 8, time.bottom + 15, "faults", anchor="end")
    below = PlotArea(time.left, time.top, time.width, time.height + 20)
    figure.axis_below(below, "seconds since the run began", [(n / 5, f"{wall * n / 5:.4g}") for n in range(6)])
    sums = sorted(((kind, sum_) for kind, sum_ in of.seconds.items() if sum_ > 0), key=lambda item: -item[1])
    bars = PlotArea(LEFT, figure.bottom + 24, WIDTH - LEFT - 150, ROW * len(sums))
    most = max((sum_ for _, sum_ in sums), default=1.0)
    for row, (kind, sum_) in enumerate(sums):
        top = bars.top + row * ROW
        figure.rect(bars.left, top + 4, bars.width * sum_ / most, ROW - 8, COLOURS[kind])
        figure.text(bars.left - 8, top + 18, words(kind), anchor="end")
        figure.text(bars.left + bars.width * sum_ / most + 8, top + 18, f"{sum_:.4g} s, {sum_ / wall:.1%}")
    figure.axis_below(bars, "seconds", [(0.0, "0"), (1.0, f"{most:.4g}")])
    return figure


def _drawn(of: Ledger) -> list[tuple[float, float, str]]:
    """(from, to, kind), as shares of the run: the pieces, or where they are many the kind that a bin has most of."""
    wall = of.wall_seconds or 1.0
    if all((part.end - part.begin) / wall * BINS > 2 for part in of.parts):
        return [(part.begin / wall, part.end / wall, part.kind) for part in of.parts]
    bins: list[dict[str, float]] = [{} for _ in range(BINS)]
    for part in of.parts:
        left, right = part.begin / wall * BINS, part.end / wall * BINS
        for n in range(int(left), min(int(right), BINS - 1) + 1):
            bins[n][part.kind] = bins[n].get(part.kind, 0.0) + min(right, n + 1) - max(left, n)
    found: list[tuple[float, float, str]] = []
    for n, held in enumerate(bins):
        kind = max(held, key=lambda kind: held[kind], default="idle")
        begin = found.pop()[0] if found and found[-1][2] == kind else n / BINS
        found.append((begin, (n + 1) / BINS, kind))
    return found
