"""Times of lines whose clock was set back meanwhile: the run's seconds are those of the monotonic clock. Torch-free.

A clock that is ahead of where it should be stays as it is: a machine that slept, or was started again, looks the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import groupby
from operator import itemgetter
from typing import Any

STEP_SECONDS = 1.0  # a clock that is set right bit by bit is never so far off between two lines

Line = dict[str, Any]


def moment(line: Line) -> float:
    """Seconds since the epoch of a line of events.jsonl or metrics.jsonl."""
    time = line["time"]
    return float(time) if isinstance(time, int | float) else datetime.fromisoformat(time).timestamp()


def set_right(lines: Iterable[Line]) -> list[Line]:
    """The same lines, in the same order; times of a clock that was set back go on from where they had been.

    A record of a step is of the machine that wrote the events of its generation.
    """
    every = list(lines)
    machine = {line["generation"]: line["host"] for line in every if line.get("event") == "start" and "host" in line}
    keyed = [
        (str(line.get("host") or machine.get(line.get("generation"), "")), line.get("generation", 1), number)
        for number, line in enumerate(every)
        if isinstance(line.get("monotonic"), int | float)
    ]
    for _, those in groupby(sorted(keyed, key=itemgetter(0)), key=itemgetter(0)):
        order = sorted((generation, every[number]["monotonic"], number) for _, generation, number in those)
        for number, ahead in _ahead([(number, every[number]) for *_, number in order]):
            every[number] = _later(every[number], ahead)
    return every


def _ahead(lines: list[tuple[int, Line]]) -> Iterator[tuple[int, float]]:
    """(number of a line, by how much its time is too early), of the lines for which that is so."""
    ahead, before = 0.0, None
    for number, line in lines:
        at, tick = moment(line), float(line["monotonic"])
        if before is not None:
            off = before[0] + (tick - before[1]) - (at + ahead)  # more than nothing: it was set back
            if tick < before[1]:  # the machine was started again
                ahead = 0.0
            elif off > STEP_SECONDS or off < -STEP_SECONDS:
                ahead = max(0.0, ahead + off)
        before = at + ahead, tick
        if ahead:
            yield number, ahead


def _later(line: Line, seconds: float) -> Line:
    moved = {**line, "time": moment(line) + seconds}
    if line.get("found"):
        at = moment({"time": line["found"]}) + seconds
        moved["found"] = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds")
    return moved
