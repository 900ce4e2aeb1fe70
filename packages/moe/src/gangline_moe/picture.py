"""The experts' load as a picture: over the run, a panel for each layer; and at one time, a row for each layer.

Torch-free. The colours stand for an expert's load over the mean load of its layer: blue below it, red above it.
"""

from __future__ import annotations

from collections.abc import Sequence

from gangline.figure import GAP, PALE, SIZE, Figure, PlotArea, diverging, room_left
from gangline_moe.load_history import StepLoads, layers_of, shares, windows

MOST = 2.0  # times the mean: the end of the colours
BAR = 330  # pixels, of the colour scale
TICKS = [(0.0, "0"), (0.25, "0.5"), (0.5, "1"), (0.75, "1.5"), (1.0, "2+")]


def colour(load: float) -> str:
    """Of a load over the mean."""
    return diverging(load / MOST)


def over_time(steps: list[StepLoads], columns: int, run: str) -> Figure:
    """Experts down and steps across, a panel for each layer; each cell is of one stretch of steps."""
    parts = windows(steps, columns)
    wide = max(4, 720 // len(parts))
    experts = max(len(load) for step in steps for load in step.loads.values())
    left = GAP + room_left([(0.0, str(experts - 1))])
    figure = _figure(steps, run, left + max(wide * len(parts), BAR) + 6 * GAP, f"a cell is {_lengths(parts)}")
    layers = layers_of(steps)
    for layer in layers:
        count = next(len(step.loads[layer]) for step in steps if layer in step.loads)
        figure.text(left, figure.bottom + SIZE + GAP, layer, bold=True)
        high = min(16.0, max(4.0, 96 / count))
        frame = PlotArea(left, figure.bottom + GAP / 2, wide * len(parts), high * count)
        for column, part in enumerate(parts):
            there = any(layer in step.loads for step in part)
            loads = shares(part, layer) if there else [None] * count
            for expert, load in enumerate(loads):
                tip = f"{layer}, expert {expert}, steps {part[0].step} to {part[-1].step}: {_said(load)}"
                _cell(figure, frame.left + column * wide, frame.top + expert * high, wide, high, load, tip)
        _edges(figure, frame)
        figure.axis_left(frame, "expert", _numbers(count))
        figure.axis_below(
            frame,
            "step" if layer == layers[-1] else "",
            [((at + 0.5) / len(parts), str(part[-1].step)) for at, part in enumerate(parts)],
        )
    return _with_scale(figure, left)


def by_layer(steps: list[StepLoads], run: str) -> Figure:
    """Layers down and experts across, over all of `steps`."""
    layers = layers_of(steps)
    table = [shares(steps, layer) for layer in layers]
    count = max(map(len, table))
    wide, high = min(32, max(4, 720 // count)), max(16.0, 48 / len(layers))
    rows = [((at + 0.5) / len(layers), layer) for at, layer in enumerate(layers)]
    left = GAP + room_left(rows)
    figure = _figure(steps, run, left + max(wide * count, BAR) + 6 * GAP)
    frame = PlotArea(left, figure.bottom, wide * count, high * len(layers))
    for row, (layer, loads) in enumerate(zip(layers, table, strict=True)):
        for expert, load in enumerate(loads):
            tip = f"{layer}, expert {expert}: {_said(load)}"
            _cell(figure, left + expert * wide, frame.top + row * high, wide, high, load, tip)
    _edges(figure, frame)
    figure.axis_left(frame, "layer", rows)
    figure.axis_below(frame, "expert", _numbers(count))
    return _with_scale(figure, left)


def _figure(steps: list[StepLoads], run: str, width: float, more: str = "") -> Figure:
    first, last = steps[0].step, steps[-1].step
    about = f"step {first}" if first == last else f"steps {first} to {last}"
    return Figure(f"Load of the experts: {run}", f"{about}; {more}" if more else about, width)


def _with_scale(figure: Figure, left: float) -> Figure:
    bar = PlotArea(left, figure.bottom + 2 * GAP, BAR, 12)
    figure.colour_bar(bar, "tokens of an expert over the mean of its layer", TICKS, lambda share: colour(share * MOST))
    return figure


def _cell(figure: Figure, left: float, top: float, wide: float, high: float, load: float | None, tip: str) -> None:
    figure.rect(left, top, wide, high, PALE if load is None else colour(load), tip)


def _edges(figure: Figure, frame: PlotArea) -> None:
    """Above and at the right, where there is no axis: an even load is almost white."""
    figure.line(frame.left, frame.top, frame.right, frame.top)
    figure.line(frame.right, frame.top, frame.right, frame.bottom)


def _said(load: float | None) -> str:
    return "no token in the layer" if load is None else f"{load:.2f} times the mean"


def _numbers(count: int) -> list[tuple[float, str]]:
    """Where the numbers of `count` experts stand: all of them, or every 2nd, 4th, ..."""
    every = next(2**power for power in range(32) if count / 2**power <= 16)
    return [((expert + 0.5) / count, str(expert)) for expert in range(0, count, every)]


def _lengths(parts: Sequence[Sequence[StepLoads]]) -> str:
    least, most = min(map(len, parts)), max(map(len, parts))
    if most == 1:
        return "one step"
    return f"{most} steps" if least == most else f"{least} or {most} steps"
