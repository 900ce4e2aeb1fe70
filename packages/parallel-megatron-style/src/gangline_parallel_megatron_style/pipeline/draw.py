"""A schedule with its times as a picture, ranks down and time across: text for a terminal, SVG for a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from gangline.figure import GAP, PALE, PALETTE, Figure, PlotArea, mixed, number_ticks, room_left, span
from gangline_parallel_megatron_style.pipeline.actions import KINDS, Kind, PipelineAction
from gangline_parallel_megatron_style.pipeline.simulate import Span, Timeline

COLOURS: dict[Kind, str] = dict(zip(("F", "B", "I", "W"), PALETTE, strict=False))  # of chunk 0; later ones paler
ROW = 26  # pixels


@dataclass(frozen=True)
class Caption:
    """The words around a picture of a schedule: its title, where its times are from, their unit."""

    title: str
    about: str = "simulated; a backward pass takes twice as long as a forward pass"
    unit: str = "forward passes of one stage"


def as_text(timeline: Timeline, caption: Caption, width: int = 100) -> str:
    """One line for each rank: `F0` is the forward of microbatch 0, small letters are odd chunks, dots are waits.

    Lines are at most `width` letters long where that leaves one for the shortest kind of action; where it leaves just
    one, the last digits of the microbatches stand in a second line. Below is the axis of time.
    """
    label = len(f"rank {timeline.schedule.ranks - 1}  ")
    shortest = min(map(mean, _durations(timeline).values()))
    letters = max(1, int((width - label) * shortest / timeline.makespan + 1e-9))
    scale = letters / shortest
    lines = [caption.title, caption.about, ""]
    for rank in range(timeline.schedule.ranks):
        line, digits = ["."] * round(timeline.makespan * scale), [" "] * round(timeline.makespan * scale)
        for action, (start, end) in _spans(timeline, rank):
            first, last = round(start * scale), round(end * scale)
            letter = action.kind.lower() if action.chunk % 2 else action.kind
            number = str(action.microbatch) if letters > len(str(action.microbatch)) else ""
            line[first:last] = (letter + number).ljust(last - first)[: last - first]
            digits[first:last] = str(action.microbatch % 10).ljust(last - first)[: last - first]
        lines.append(f"rank {rank}".ljust(label) + "".join(line))
        if letters == 1:
            lines.append(" " * label + "".join(digits).rstrip())
    lines.append(" " * label + _ruler(timeline, round(timeline.makespan * scale)))
    return "\n".join([*lines, f"time in {caption.unit}", "", _legend(timeline), _summary(timeline, caption)])


def _ruler(timeline: Timeline, letters: int) -> str:
    """The axis of time: each number begins below the letter that begins at that time."""
    line = ""
    for at, number in number_ticks(timeline.makespan, max(2, letters // 12)):
        if round(at * letters) + len(number) <= letters:
            line = line.ljust(round(at * letters)) + number
    return line


def as_svg(timeline: Timeline, caption: Caption, width: int = 960) -> str:
    """The same as a picture `width` pixels wide, of one self-contained SVG element."""
    ranks = timeline.schedule.ranks
    rows = [((rank + 0.5) / ranks, str(rank)) for rank in range(ranks)]
    figure = Figure(caption.title, f"{caption.about}\n{_summary(timeline, caption)}", width)
    left = GAP + room_left(rows)
    frame = PlotArea(left, figure.bottom, width - left - 3 * GAP, ranks * ROW)
    scale = frame.width / timeline.makespan
    widest = span(str(timeline.schedule.microbatches - 1), 11)
    numbered = {kind for kind, times in _durations(timeline).items() if min(times) * scale >= widest}
    for rank in range(ranks):
        top = frame.top + rank * ROW
        figure.rect(left, top + 2, frame.width, ROW - 4, PALE, f"rank {rank} waits")
        for action, (start, end) in _spans(timeline, rank):
            place, wide = left + start * scale, (end - start) * scale
            fill = _colour(action.kind, action.chunk, timeline.schedule.chunks)
            figure.rect(
                place, top + 2, wide, ROW - 4, fill, f"rank {rank}, {action}: {start:.4g} to {end:.4g}", outline=True
            )
            if action.kind in numbered:
                figure.text(place + wide / 2, top + ROW / 2 + 4, str(action.microbatch), size=11, anchor="middle")
    figure.axis_left(frame, "rank of the pipeline" if ranks > 5 else "rank", rows)
    numbers = "; the numbers are microbatches" if numbered else ""
    figure.axis_below(frame, f"time ({caption.unit}){numbers}", number_ticks(timeline.makespan))
    entries = [(_colour(*pair, timeline.schedule.chunks), _words(timeline, *pair)) for pair in _present(timeline)]
    figure.legend(left, figure.bottom + GAP, [*entries, (PALE, "waits")])
    return figure.svg()


def _colour(kind: Kind, chunk: int, chunks: int) -> str:
    return mixed(COLOURS[kind], "#ffffff", 0.55 * chunk / max(1, chunks - 1))


def _words(timeline: Timeline, kind: Kind, chunk: int) -> str:
    return KINDS[kind] + (f", chunk {chunk}" if timeline.schedule.chunks > 1 else "")


def _spans(timeline: Timeline, rank: int) -> Iterator[tuple[PipelineAction, Span]]:
    for action, (start, end) in zip(timeline.schedule.actions[rank], timeline.spans[rank], strict=True):
        yield action, (start - timeline.start, end - timeline.start)


def _durations(timeline: Timeline) -> dict[Kind, list[float]]:
    found: dict[Kind, list[float]] = defaultdict(list)
    for rank in range(timeline.schedule.ranks):
        for action, (start, end) in _spans(timeline, rank):
            found[action.kind].append(end - start)
    return found


def _present(timeline: Timeline) -> list[tuple[Kind, int]]:
    found = {(action.kind, action.chunk) for order in timeline.schedule.actions for action in order}
    return sorted(found, key=lambda pair: (list(KINDS).index(pair[0]), pair[1]))


def _legend(timeline: Timeline) -> str:
    kinds = dict.fromkeys(kind for kind, _ in _present(timeline))
    words = [f"{kind} {KINDS[kind]}" for kind in kinds]
    if timeline.schedule.chunks > 1:
        words.append("small letters: odd chunks")
    return "   ".join([*words, ". waits"])


def _summary(timeline: Timeline, caption: Caption) -> str:
    return f"{timeline.makespan:.4g} {caption.unit} from first to last; ranks wait {100 * timeline.bubble:.1f} % of it"
