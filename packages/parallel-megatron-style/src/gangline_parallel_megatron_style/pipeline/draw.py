"""A schedule with its times as a picture, ranks down and time across: text for a terminal, SVG for a page."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import mean

from gangline_parallel_megatron_style.pipeline.actions import KINDS, Action, Kind
from gangline_parallel_megatron_style.pipeline.simulate import Span, Timeline

COLOURS: dict[Kind, tuple[str, str]] = {  # even and odd chunks; dark letters are readable on all of them
    "F": ("#7eb0ee", "#bcd6f7"),
    "B": ("#7fcb8a", "#bfe6c4"),
    "I": ("#f2a48c", "#f9d3c7"),
    "W": ("#eec75a", "#f7e4ad"),
}
STYLE = """
text { font: 11px ui-monospace, monospace; fill: #111; text-anchor: middle; dominant-baseline: central }
.word { fill: #222; text-anchor: start }
.wait { fill: #888; fill-opacity: 0.15 }
@media (prefers-color-scheme: dark) { .word { fill: #ddd } .wait { fill-opacity: 0.3 } }
"""
ROW, LABEL, MARGIN = 24, 62, 8  # pixels


def as_text(timeline: Timeline, width: int = 100) -> str:
    """One line for each rank: `F0` is the forward of micro-batch 0, small letters are odd chunks, dots are waits.

    Lines are at most `width` letters long where that leaves one for the shortest kind of action; where it leaves just
    one, the last digits of the micro-batches stand in a second line.
    """
    label = len(f"rank {timeline.schedule.ranks - 1}  ")
    shortest = min(map(mean, _durations(timeline).values()))
    letters = max(1, int((width - label) * shortest / timeline.makespan + 1e-9))
    scale = letters / shortest
    lines = []
    for rank in range(timeline.schedule.ranks):
        line, digits = ["."] * round(timeline.makespan * scale), [" "] * round(timeline.makespan * scale)
        for action, (start, end) in _spans(timeline, rank):
            first, last = round(start * scale), round(end * scale)
            letter = action.kind.lower() if action.chunk % 2 else action.kind
            number = str(action.micro) if letters > len(str(action.micro)) else ""
            line[first:last] = (letter + number).ljust(last - first)[: last - first]
            digits[first:last] = str(action.micro % 10).ljust(last - first)[: last - first]
        lines.append(f"rank {rank}".ljust(label) + "".join(line))
        if letters == 1:
            lines.append(" " * label + "".join(digits).rstrip())
    return "\n".join([*lines, "", _legend(timeline), _summary(timeline)])


def as_svg(timeline: Timeline, width: int = 960) -> str:
    """The same as a picture `width` pixels wide, of one self-contained SVG element, for light and dark pages."""
    ranks = timeline.schedule.ranks
    scale = (width - LABEL - MARGIN) / timeline.makespan
    parts = []
    for rank in range(ranks):
        top = MARGIN + rank * ROW
        parts.append(f'<text class="word" x="{MARGIN}" y="{top + ROW / 2:g}">rank {rank}</text>')
        parts.append(_box("wait", LABEL, top, timeline.makespan * scale, f"rank {rank} waits"))
        for action, (start, end) in _spans(timeline, rank):
            left, wide = LABEL + start * scale, (end - start) * scale
            parts.append(_box(_class(action), left, top, wide, f"rank {rank}, {action}: {start:.4g} to {end:.4g}"))
            if wide >= 7 * len(str(action.micro)):
                parts.append(f'<text x="{left + wide / 2:.1f}" y="{top + ROW / 2:g}">{action.micro}</text>')
    top = 2 * MARGIN + ranks * ROW
    at = float(LABEL)
    for kind, chunk in _present(timeline):
        words = KINDS[kind] + (f", chunk {chunk}" if timeline.schedule.chunks > 1 else "")
        parts.append(_box(f"{kind}{chunk % 2}", at, top, 14, words))
        parts.append(f'<text class="word" x="{at + 18:g}" y="{top + ROW / 2:g}">{words}</text>')
        at += 30 + 6.8 * len(words)
        if at > width - 250:
            top, at = top + ROW, LABEL
    parts.append(f'<text class="word" x="{LABEL}" y="{top + 1.5 * ROW:g}">{_summary(timeline)}</text>')
    colours = "".join(
        f".{kind}{odd} {{ fill: {colour} }} " for kind, pair in COLOURS.items() for odd, colour in enumerate(pair)
    )
    height = top + 2 * ROW + MARGIN
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" {size}>', f"<style>{STYLE}{colours}</style>"]
    return "\n".join([*head, *parts, "</svg>\n"])


def _spans(timeline: Timeline, rank: int) -> Iterator[tuple[Action, Span]]:
    for action, (start, end) in zip(timeline.schedule.actions[rank], timeline.spans[rank], strict=True):
        yield action, (start - timeline.start, end - timeline.start)


def _durations(timeline: Timeline) -> dict[Kind, list[float]]:
    found: dict[Kind, list[float]] = defaultdict(list)
    for rank in range(timeline.schedule.ranks):
        for action, (start, end) in _spans(timeline, rank):
            found[action.kind].append(end - start)
    return found


def _class(action: Action) -> str:
    return f"{action.kind}{action.chunk % 2}"


def _box(name: str, left: float, top: float, wide: float, title: str) -> str:
    place = f'x="{left:.2f}" y="{top + 2:g}" width="{wide:.2f}" height="{ROW - 4}"'
    return f'<rect class="{name}" {place} stroke="#555" stroke-width="0.3"><title>{title}</title></rect>'


def _present(timeline: Timeline) -> list[tuple[Kind, int]]:
    found = {(action.kind, action.chunk) for order in timeline.schedule.actions for action in order}
    return sorted(found, key=lambda pair: (list(KINDS).index(pair[0]), pair[1]))


def _legend(timeline: Timeline) -> str:
    kinds = dict.fromkeys(kind for kind, _ in _present(timeline))
    words = [f"{kind} {KINDS[kind]}" for kind in kinds]
    if timeline.schedule.chunks > 1:
        words.append("small letters: odd chunks")
    return "   ".join([*words, ". waits"])


def _summary(timeline: Timeline) -> str:
    return f"{timeline.makespan:.4g} from first to last, {100 * timeline.bubble:.1f} % of it waiting"
