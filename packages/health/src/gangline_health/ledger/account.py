"""Accounting of a run's time: turns the starts of a run into spans of time, each of one kind. Torch-free.

A step ends at its record's `time`, and consists of data, forward and backward, and optimizer. Its wait for other ranks
is the mean over ranks (`rank_phases`). The part of the wait that counts as pipeline bubble is at most the bubble of
1F1B, (p - 1) / (m + p - 1) of the forward and backward passes (arXiv 2104.04473, section 2.2); the remaining wait is
exposed communication. The time that the first step of a start takes beyond later steps is compilation. After the last
log line of a killed start, the duration of one step is lost work. The time from then until the failure was noticed is
detection.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

from gangline_health.ledger.spans import Span
from gangline_health.ledger.starts import Line, RanksStart, find_undone, parse_time

BASE, STEP, PHASE = 0, 1, 2  # levels of a start, a step, a phase that rank 0 logged; in an overlap, the highest counts
PHASES = {"save": "checkpoint_stall", "recovery": "recovery", "validate": "compute"}
FAULTS = ("rank", "node", "joined", "response")  # reasons of launches that continue the same job
Bubble = Callable[[Line, Line], float]  # (event "start", step record) -> the bubble's share of the passes


def generate_spans(starts: Sequence[RanksStart], bubble: Bubble = lambda start, record: 0.0) -> Iterator[Span]:
    """Yield every span of time that the starts of a run describe; spans overlap (see `flatten_spans`)."""
    undone_ids = find_undone(starts)
    for before, each in pairwise((None, *starts)):
        assert each is not None
        goes_on = before is not None and continues_job(each)
        yield from _split_restart(before, each)
        yield Span(each.begin, get_first_step_time(each), "recovery" if goes_on else "start", BASE)
        yield from _generate_phase_spans(each, "recovery" if goes_on else "start")
        start = next((event for event in each.events if event["event"] == "start"), {})
        yield from _generate_step_spans(each, undone_ids, partial(bubble, start))


def continues_job(each: RanksStart) -> bool:
    """Return whether a start is a restart within the same job."""
    return each.launch is not None and each.launch.get("why") in FAULTS


def estimate_detection(each: RanksStart) -> float:
    """Return when the failure before a start was noticed, in seconds since the epoch; if unknown, the start's begin."""
    detection = (each.launch or {}).get("found")
    return parse_time({"time": detection}) if detection else each.begin


def compute_step_seconds(each: RanksStart) -> float:
    """Return the median step time of the last 16 steps of a start, in seconds; 0 without a step."""
    return statistics.median([record["step_seconds"] for record in each.steps[-16:]] or [0.0])


def get_first_step_time(each: RanksStart) -> float:
    """Return when the first step of a start began, in seconds since the epoch; without a step, its last log line."""
    return each.steps[0]["time"] - _sum_phases(each.steps[0]) if each.steps else each.last


def _split_restart(before: RanksStart | None, each: RanksStart) -> Iterator[Span]:
    """Yield the spans between the last log line of the start `before` and the launch of the next start."""
    if before is None:
        return
    if not before.ended:
        yield Span(before.last, before.last + compute_step_seconds(before), "lost_work", BASE + 1)
    if continues_job(each):
        detection = max(
            before.last, estimate_detection(each)
        )  # ranks that lost a peer may log after the failure was noticed
        yield Span(before.last, detection, "detection", BASE)
        yield Span(detection, each.begin, "recovery", BASE)


def _generate_phase_spans(each: RanksStart, kind: str) -> Iterator[Span]:
    """Yield a span for each logged phase; an unfinished phase ends with the start.

    The kind of a span is the kind of its phase in `PHASES`, or `kind` if the phase is not in `PHASES`.
    """
    begins: dict[str, float] = {}
    for line in each.events:
        if line["event"] != "phase":
            continue
        name, at = line["phase"], parse_time(line)
        if line["at"] == "begin":
            begins[name] = at
        elif name in begins:
            yield Span(begins.pop(name), at, PHASES.get(name, kind), PHASE)
    for name, at in begins.items():
        yield Span(at, each.last, PHASES.get(name, kind), PHASE)


def _generate_step_spans(each: RanksStart, lost: set[int], bubble: Callable[[Line], float]) -> Iterator[Span]:
    usual = statistics.median([_get_pass_seconds(record) for record in each.steps[1:17]] or [0.0])
    before = 0.0
    for number, record in enumerate(each.steps):
        end, duration, seconds = float(record["time"]), _sum_phases(record), record["seconds"]
        at = max(end - duration, before)
        agree = min(float(seconds.get("sync", 0.0)), at - before) if before else 0.0
        compiling = max(0.0, _get_pass_seconds(record) - usual) if number == 0 and usual else 0.0
        waits = min(_compute_wait_seconds(record), _get_pass_seconds(record) - compiling)
        empty = min(waits, bubble(record) * _get_pass_seconds(record))
        pieces = (
            ("exposed_communication", before, before + agree),
            *_lay_side_by_side(
                at,
                ("data_wait", float(seconds.get("data", 0.0))),
                ("compile", compiling),
                ("exposed_communication", waits - empty),
                ("bubble", empty),
            ),
        )
        undone_step = id(record) in lost
        yield Span(at, end, "lost_work" if undone_step else "compute", STEP)
        for kind, left, right in pieces if not undone_step else ():
            yield Span(left, min(right, end), kind, STEP)
        if undone_step and before:
            yield Span(before, before + agree, "lost_work", STEP)
        before = end


def _lay_side_by_side(at: float, *pieces: tuple[str, float]) -> Iterator[tuple[str, float, float]]:
    for kind, seconds in pieces:
        yield kind, at, at + seconds
        at += seconds


def _get_pass_seconds(record: Line) -> float:
    return float(record["seconds"].get("forward_backward", 0.0))


def _sum_phases(record: Line) -> float:
    return sum(float(record["seconds"].get(phase, 0.0)) for phase in ("data", "forward_backward", "optimizer"))


def _compute_wait_seconds(record: Line) -> float:
    rows = (record.get("rank_phases") or {}).get("collective")
    return statistics.fmean(rows) if rows else 0.0
