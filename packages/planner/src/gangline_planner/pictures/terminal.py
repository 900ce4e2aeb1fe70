"""Text figures: a stacked bar, rows of stacked bars, a pipeline's timeline, a scatter plot."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence

from gangline_basics.explain.timeline import StepTimeline
from gangline_planner.pictures.colours import ACTION_WORDS, choose_letters

WIDE, HIGH = 80, 12  # characters of a figure
ROWS = 16  # maximum number of ranks to draw; of more ranks, `ROWS` evenly spaced ranks are drawn


def draw_bar(parts: Mapping[str, float], named: Mapping[str, str], whole: float, wide: int = WIDE) -> str:
    """Return a stacked bar of letters; the length of each part is its share of `whole`. named: kind -> letter."""
    line, until = "", 0.0
    for kind, size in parts.items():
        until += size
        line += named[kind] * (round(wide * until / whole) - len(line))
    return line


def draw_step_bar(kinds: Mapping[str, float]) -> Iterator[str]:
    """Yield the step time by kind as a stacked bar, and a legend of its letters."""
    letters = choose_letters(kinds)
    bar = draw_bar(kinds, letters, sum(kinds.values()))
    yield f"  |{bar}|"
    yield "  " + "  ".join(f"{letters[kind]} {kind}" for kind in kinds if letters[kind] in bar)


def draw_memory_bars(ranks: Sequence[Mapping[str, int]], limit: float) -> Iterator[str]:
    """Yield the memory of each pipeline rank as a stacked bar, with a mark at `limit`, and a legend."""
    kinds = dict.fromkeys(kind for memory in ranks for kind in memory)
    letters, most = choose_letters(kinds), max(limit, *(sum(memory.values()) for memory in ranks))
    mark = round(WIDE * limit / most)
    glyphs = set[str]()
    for rank in choose_ranks(len(ranks)):
        bar = draw_bar(ranks[rank], letters, most)
        glyphs |= set(bar)
        padded = bar.ljust(mark)
        line = padded[:mark] + "|" + padded[mark:]
        yield f"  {rank:5} {line} {sum(ranks[rank].values()) / 1e9:.4g} GB"
    yield f"        {'  '.join(f'{letters[kind]} {kind}' for kind in kinds if letters[kind] in glyphs)}  | memory limit"


def draw_timeline(found: StepTimeline) -> Iterator[str]:
    """Yield a line for each pipeline rank: over time, the letter of its action, or a dot while it waits; and a legend.

    If the mean forward pass is shorter than one character, only the begin and the end of the step are drawn.
    """
    passes = [end - start for spans in found.spans for action, start, end in spans if action.kind == "F"]
    cell = min(found.makespan / WIDE, sum(passes) / len(passes))
    moments = [(place + 0.5) * found.makespan / WIDE for place in range(WIDE)]
    cut = found.makespan > cell * WIDE * 1.001
    if cut:
        moments = [(place + 0.5) * cell for place in range(WIDE // 2 - 2)]
        moments += [found.makespan - moment for moment in reversed(moments)]
    glyphs = set[str]()
    for rank in choose_ranks(len(found.spans)):
        spans = found.spans[rank]
        starts, line = [start for _, start, _ in spans], ""
        for at in moments:
            place = bisect_right(starts, at) - 1
            line += spans[place][0].kind if place >= 0 and at < spans[place][2] else "."
        glyphs |= set(line)
        yield f"  {rank:5} {f'{line[: len(line) // 2]} .. {line[len(line) // 2 :]}' if cut else line}"
    legend = "  ".join(f"{letter} {words}" for letter, words in ACTION_WORDS.items() if letter in glyphs)
    yield f"        {legend}  . waits; {found.makespan:.4g} s from left to right{', the middle is not drawn' * cut}"


def choose_ranks(count: int) -> list[int]:
    """Return the ranks to draw: all, or `ROWS` evenly spaced ranks from the first to the last."""
    if count <= ROWS:
        return list(range(count))
    return [round(row * (count - 1) / (ROWS - 1)) for row in range(ROWS)]


def draw_points(
    points: Sequence[tuple[float, float]], front: Sequence[tuple[float, float]], names: tuple[str, str]
) -> str:
    """Return a scatter plot: points (x, y) as dots, points of the front as stars. names: labels of the x and y axes."""
    every = [*points, *front]
    (left, right), (low, high) = ((min(values), max(values)) for values in zip(*every, strict=True))
    cells = [[" "] * WIDE for _ in range(HIGH)]
    for mark, group in ((".", points), ("*", front)):
        for x, y in group:
            column = round((x - left) / ((right - left) or 1) * (WIDE - 1))
            row = round((y - low) / ((high - low) or 1) * (HIGH - 1))
            cells[HIGH - 1 - row][column] = mark
    lines = [f"{high:9.4g} |{''.join(cells[0])}", *(f"{'':9} |{''.join(row)}" for row in cells[1:-1])]
    lines += [f"{low:9.4g} |{''.join(cells[-1])}", f"{'':10}+{'-' * WIDE}"]
    ends = f"{left:.4g}".ljust(WIDE - len(f"{right:.4g}")) + f"{right:.4g}"
    return "\n".join(
        [f"{names[1]}, by {names[0]}; * Pareto front: no layout is both faster and smaller", *lines, f"{'':11}{ends}"]
    )
