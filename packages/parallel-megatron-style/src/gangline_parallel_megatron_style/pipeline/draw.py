"""Drawing of a pipeline schedule, with a row for each rank and time from left to right: as text or as a figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, log10
from statistics import mean
from typing import TYPE_CHECKING

from gangline_basics.figure import INK, PALE, PALETTE, add_legend, add_tip, make_subplots, use_integer_ticks, use_style
from gangline_parallel_megatron_style.pipeline.actions import KINDS, Kind, PipelineAction
from gangline_parallel_megatron_style.pipeline.simulate import Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLOURS: dict[Kind, str] = dict(zip(("F", "B", "I", "W"), PALETTE, strict=False))  # chunk 0; later chunks are paler
ROW = 0.28  # height of a rank's row in inches
PIXELS, DIGIT = 96, 0.09  # pixels per inch; width of a digit in inches


@dataclass(frozen=True)
class Caption:
    """Texts around the drawing of a schedule: the title, the source of the times, and the unit of the times."""

    title: str
    about: str = "simulated; a backward pass takes twice as long as a forward pass"
    unit: str = "forward passes of one stage"


def as_text(timeline: Timeline, caption: Caption, width: int = 100) -> str:
    """Return a timeline as text, with one line for each rank.

    `F0` is the forward of microbatch 0, a lower-case letter means an odd chunk, and dots mean that the rank waits.
    Lines have at most `width` characters, or more if the shortest kind of action would get less than one character. If
    it gets exactly one, a second line for each rank holds the last digit of each microbatch. The last line is a time
    axis.
    """
    label = len(f"rank {timeline.schedule.ranks - 1}  ")
    shortest = min(map(mean, _collect_durations(timeline).values()))
    letters = max(1, int((width - label) * shortest / timeline.makespan + 1e-9))
    scale = letters / shortest
    lines = [caption.title, caption.about, ""]
    for rank in range(timeline.schedule.ranks):
        line, digits = ["."] * round(timeline.makespan * scale), [" "] * round(timeline.makespan * scale)
        for action, (start, end) in _iterate_spans(timeline, rank):
            first, last = round(start * scale), round(end * scale)
            letter = action.kind.lower() if action.chunk % 2 else action.kind
            number = str(action.microbatch) if letters > len(str(action.microbatch)) else ""
            line[first:last] = (letter + number).ljust(last - first)[: last - first]
            digits[first:last] = str(action.microbatch % 10).ljust(last - first)[: last - first]
        lines.append(f"rank {rank}".ljust(label) + "".join(line))
        if letters == 1:
            lines.append(" " * label + "".join(digits).rstrip())
    lines.append(" " * label + _format_ruler(timeline, round(timeline.makespan * scale)))
    return "\n".join(
        [*lines, f"time in {caption.unit}", "", _format_legend(timeline), _format_summary(timeline, caption)]
    )


def _format_ruler(timeline: Timeline, letters: int) -> str:
    """Return the time axis: each number begins below the character that starts at the number's time."""
    least = timeline.makespan / max(2, letters // 12)
    power = 10.0 ** floor(log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * 0.999)
    line = ""
    for place in range(int(timeline.makespan / step * 1.0001) + 1):
        column, number = round(place * step / timeline.makespan * letters), f"{place * step:.6g}"
        if column + len(number) <= letters:
            line = line.ljust(column) + number
    return line


@use_style()
def make_schedule_figure(timeline: Timeline, caption: Caption, width: int = 960) -> Figure:
    """Return a timeline as a figure of `width` pixels."""
    from matplotlib.patches import Rectangle

    ranks, wide = timeline.schedule.ranks, width / PIXELS
    digits = len(str(timeline.schedule.microbatches - 1)) * DIGIT / (wide - 1) * timeline.makespan
    numbered = {kind for kind, times in _collect_durations(timeline).items() if min(times) >= digits}
    about = [caption.about, _format_summary(timeline, caption), "The numbers are microbatches." if numbered else ""]
    figure, (axes,) = make_subplots(caption.title, "\n".join(about), [ROW * max(ranks, 2)], wide)
    entries = dict.fromkeys(_list_kinds(timeline))
    for rank in range(ranks):
        axes.barh(rank, timeline.makespan, 0.86, color=PALE)
        for action, (start, end) in _iterate_spans(timeline, rank):
            fill = _choose_colour(action.kind, action.chunk, timeline.schedule.chunks)
            box = Rectangle((start, rank - 0.43), end - start, 0.86, facecolor=fill, edgecolor=INK, linewidth=0.5)
            add_tip(axes.add_artist(box), f"rank {rank}, {action}: {start:.4g} to {end:.4g}")
            entries[action.kind, action.chunk] = box
            if action.kind in numbered:
                axes.text((start + end) / 2, rank, str(action.microbatch), fontsize=8, ha="center", va="center")
    axes.set(xlabel=f"time ({caption.unit})", xlim=(0, timeline.makespan), ylabel="rank", ylim=(ranks - 0.5, -0.5))
    use_integer_ticks(axes.yaxis)
    axes.grid(False)
    handles = [*entries.values(), Rectangle((0, 0), 1, 1, facecolor=PALE)]
    words = [*(_describe_kind(timeline, *pair) for pair in entries), "waits"]
    add_legend(axes, below=max(1, int(wide / 2.2)), handles=handles, labels=words)
    return figure


def _choose_colour(kind: Kind, chunk: int, chunks: int) -> tuple[float, ...]:
    from matplotlib.colors import to_rgb

    share = 0.55 * chunk / max(1, chunks - 1)
    return tuple(part + (1 - part) * share for part in to_rgb(COLOURS[kind]))


def _describe_kind(timeline: Timeline, kind: Kind, chunk: int) -> str:
    return KINDS[kind] + (f", chunk {chunk}" if timeline.schedule.chunks > 1 else "")


def _iterate_spans(timeline: Timeline, rank: int) -> Iterator[tuple[PipelineAction, Span]]:
    for action, (start, end) in zip(timeline.schedule.actions[rank], timeline.spans[rank], strict=True):
        yield action, (start - timeline.start, end - timeline.start)


def _collect_durations(timeline: Timeline) -> dict[Kind, list[float]]:
    durations: dict[Kind, list[float]] = defaultdict(list)
    for rank in range(timeline.schedule.ranks):
        for action, (start, end) in _iterate_spans(timeline, rank):
            durations[action.kind].append(end - start)
    return durations


def _list_kinds(timeline: Timeline) -> list[tuple[Kind, int]]:
    kinds = {(action.kind, action.chunk) for order in timeline.schedule.actions for action in order}
    return sorted(kinds, key=lambda pair: (list(KINDS).index(pair[0]), pair[1]))


def _format_legend(timeline: Timeline) -> str:
    kinds = dict.fromkeys(kind for kind, _ in _list_kinds(timeline))
    words = [f"{kind} {KINDS[kind]}" for kind in kinds]
    if timeline.schedule.chunks > 1:
        words.append("lower case: odd chunks")
    return "   ".join([*words, ". waits"])


def _format_summary(timeline: Timeline, caption: Caption) -> str:
    return f"{timeline.makespan:.4g} {caption.unit} in total; ranks wait {100 * timeline.bubble:.1f} % of the time"
