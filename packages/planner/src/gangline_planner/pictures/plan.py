"""A plan as SVG: the step as a stacked bar, the memory of each pipeline rank, and the pipeline's timeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gangline.explain.timeline import StepTimeline
from gangline.figure import GAP, PALE, Figure, PlotArea, number_ticks, room_left
from gangline_planner.forecast import Forecast
from gangline_planner.pictures.colours import ACTION_WORDS, ACTIONS, colour

WIDTH, BAR, ROW = 960, 34, 14  # pixels
LEAST = 1.0  # of a rectangle
CELLS = 800  # of a row of the timeline, where it has more actions than that


def plan_figure(plan: Forecast) -> Figure:
    """All three, one below the other."""
    axes = " x ".join(f"{axis} {size}" for axis, size in plan.explained.mesh.sizes if size > 1) or "one rank"
    about = f"{axes}; MFU {plan.mfu:.1%}, {plan.tokens_per_second:,.0f} tokens a second"
    figure = Figure(f"A step of {plan.world} ranks of {plan.cluster.name}: {plan.step.seconds:.4g} s", about, WIDTH)
    _step(figure, plan.step.kinds)
    _memory(figure, [rank.bytes for rank in plan.explained.ranks], plan.cluster["memory.bytes"])
    if len(plan.explained.ranks) > 1:
        _timeline(figure, plan.step.timeline)
    return figure


def _step(figure: Figure, kinds: Mapping[str, float]) -> None:
    frame = PlotArea(GAP, figure.bottom + GAP, WIDTH - 4 * GAP, BAR)
    whole, at = sum(kinds.values()), 0.0
    for place, (kind, seconds) in enumerate(kinds.items()):
        wide = frame.width * seconds / whole
        if wide >= LEAST:
            figure.rect(frame.left + at, frame.top, wide, BAR, colour(place), f"{kind}: {seconds:.4g} s", outline=True)
        at += wide
    figure.axis_below(frame, "seconds of the step, by kind", number_ticks(whole))
    entries = [(colour(n), f"{kind} {kinds[kind] / whole:.1%}") for n, kind in enumerate(kinds) if kinds[kind] > 1e-9]
    figure.legend(GAP, figure.bottom + GAP, entries)


def _memory(figure: Figure, ranks: Sequence[Mapping[str, int]], limit: float) -> None:
    kinds = list(dict.fromkeys(kind for held in ranks for kind, size in held.items() if size))
    ticks = [((rank + 0.5) / len(ranks), str(rank)) for rank in range(len(ranks))]
    left = GAP + room_left(ticks)
    high = max(ROW * len(ranks), 6 * ROW)
    frame = PlotArea(left, figure.bottom + 3 * GAP, WIDTH - left - 3 * GAP, high)
    most, row = max(limit, *(sum(held.values()) for held in ranks)), high / len(ranks)
    for rank, held in enumerate(ranks):
        at = 0.0
        for kind, size in held.items():
            wide = frame.width * size / most
            tip = f"rank {rank}, {kind}: {size / 1e9:.4g} GB"
            if wide >= LEAST:
                figure.rect(frame.left + at, frame.top + rank * row, wide, row - 1, colour(kinds.index(kind)), tip)
            at += wide
    mark = frame.left + frame.width * limit / most
    figure.line(mark, frame.top, mark, frame.bottom)
    figure.axis_left(frame, "pipeline rank", ticks)
    figure.axis_below(frame, "gigabytes; the line is what an accelerator has", number_ticks(most / 1e9))
    figure.legend(left, figure.bottom + GAP, [(colour(n), kind) for n, kind in enumerate(kinds)])


def _timeline(figure: Figure, found: StepTimeline) -> None:
    ranks = len(found.spans)
    ticks = [((rank + 0.5) / ranks, str(rank)) for rank in range(ranks)]
    left = GAP + room_left(ticks)
    high = max(ROW * ranks, 6 * ROW)
    frame = PlotArea(left, figure.bottom + 3 * GAP, WIDTH - left - 3 * GAP, high)
    row = high / ranks
    for rank, spans in enumerate(found.spans):
        top = frame.top + rank * row
        figure.rect(frame.left, top, frame.width, row - 1, PALE, f"rank {rank} waits")
        for kind, start, end, tip in drawn([(str(action.kind), a, b, str(action)) for action, a, b in spans]):
            x, wide = start / found.makespan * frame.width, (end - start) / found.makespan * frame.width
            figure.rect(frame.left + x, top, max(wide - 0.5, LEAST), row - 1, ACTIONS[kind], tip)
    figure.axis_left(frame, "pipeline rank", ticks)
    figure.axis_below(frame, "seconds of the passes", number_ticks(found.makespan))
    kinds = dict.fromkeys(action.kind for spans in found.spans for action, _, _ in spans)
    entries = [(ACTIONS[kind], ACTION_WORDS[kind]) for kind in ACTION_WORDS if kind in kinds]
    figure.legend(left, figure.bottom + GAP, [*entries, (PALE, "waits")])


Drawn = tuple[str, float, float, str]  # kind, start, end, what is said of it


def drawn(spans: Sequence[Drawn]) -> list[Drawn]:
    """The actions of a rank; where there are more than pixels, those of one kind that follow each other as one."""
    if len(spans) <= CELLS:
        return list(spans)
    found: list[Drawn] = []
    for kind, start, end, _ in spans:
        if found and found[-1][0] == kind and start - found[-1][2] < 1e-3 * (end - start):
            found[-1] = (kind, found[-1][1], end, ACTION_WORDS[kind])
        else:
            found.append((kind, start, end, ACTION_WORDS[kind]))
    return found
