"""Correction of times in log lines after a wall clock was set back, by the monotonic clock. Torch-free.

A wall clock that was set forward is not corrected but reported: a machine that slept looks the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby, pairwise
from operator import itemgetter
from typing import Any

STEP_SECONDS = 1.0  # minimum jump of a clock: gradual clock adjustments between two lines are smaller

Line = dict[str, Any]


def parse_time(line: Line) -> float:
    """Return the time of a line of events.jsonl or metrics.jsonl, in seconds since the epoch."""
    time = line["time"]
    return float(time) if isinstance(time, int | float) else datetime.fromisoformat(time).timestamp()


def set_right(lines: Iterable[Line]) -> list[Line]:
    """Return the lines in their order, with corrected times of lines after a clock was set back.

    A corrected time is the time that the clock would have shown if it had not been set back.

    A step record belongs to the machine that wrote the "start" event of its generation.
    """
    every = list(lines)
    for those in _group_by_machine(every):
        for number, ahead in _find_early(those):
            every[number] = _shift_line(every[number], ahead)
    return every


def sum_forward_jumps(lines: Iterable[Line]) -> float:
    """Return the total seconds, over all machines, by which wall clocks jumped ahead of monotonic clocks.

    The wall clock was set forward, or the machine slept; reboots do not count.
    lines: log lines as `set_right` returns them
    """
    pairs = [pair for those in _group_by_machine(list(lines)) for pair in pairwise(line for _, line in those)]
    ticks = [
        (parse_time(after) - parse_time(before), after["monotonic"] - before["monotonic"]) for before, after in pairs
    ]
    return float(sum(wall - tick for wall, tick in ticks if tick >= 0 and wall - tick > STEP_SECONDS))


def _group_by_machine(every: list[Line]) -> Iterator[list[tuple[int, Line]]]:
    """Yield for each machine its lines with both clocks, as (index, line), by generation and then monotonic clock."""
    machine = {line["generation"]: line["host"] for line in every if line.get("event") == "start" and "host" in line}
    keyed = [
        (str(line.get("host") or machine.get(line.get("generation"), "")), line.get("generation", 1), number)
        for number, line in enumerate(every)
        if isinstance(line.get("monotonic"), int | float)
    ]
    for _, those in groupby(sorted(keyed, key=itemgetter(0)), key=itemgetter(0)):
        order = sorted((generation, every[number]["monotonic"], number) for _, generation, number in those)
        yield [(number, every[number]) for *_, number in order]


def _find_early(lines: list[tuple[int, Line]]) -> Iterator[tuple[int, float]]:
    """Yield (index, seconds to add) for each line whose time is too early, because the clock was set back."""
    ahead, before = 0.0, None
    for number, line in lines:
        at, tick = parse_time(line), float(line["monotonic"])
        if before is not None:
            off = before[0] + (tick - before[1]) - (at + ahead)  # positive: the clock was set back
            if tick < before[1]:  # the machine was rebooted
                ahead = 0.0
            elif off > STEP_SECONDS or off < -STEP_SECONDS:
                ahead = max(0.0, ahead + off)
        before = at + ahead, tick
        if ahead:
            yield number, ahead


def _shift_line(line: Line, seconds: float) -> Line:
    shifted_line = {**line, "time": parse_time(line) + seconds}
    if line.get("found"):
        at = parse_time({"time": line["found"]}) + seconds
        shifted_line["found"] = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return shifted_line
