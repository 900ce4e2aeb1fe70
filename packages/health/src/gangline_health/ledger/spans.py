"""Overlapping spans of time, and the rule that assigns each second to one span. Torch-free."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

KINDS = (
    "start", "compile", "data_wait", "compute", "exposed_communication", "bubble", "checkpoint_stall", "lost_work",
    "detection", "recovery", "idle",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Span:
    """Span of time from `begin` to `end`, in seconds; if spans overlap, the span with the highest `level` counts."""

    begin: float
    end: float
    kind: str
    level: int = 0


def flatten_spans(spans: Iterable[Span], begin: float, end: float) -> list[Span]:
    """Return spans that tile [begin, end] without a gap; time that no span covers is idle.

    If spans of the highest level overlap, the span that began last counts.
    """
    cut = (_clip(s, begin, end) for s in spans)
    order = sorted((s for s in cut if s.end > s.begin), key=lambda s: s.begin)
    edges = sorted({begin, end, *(s.begin for s in order), *(s.end for s in order)})
    parts: list[Span] = []
    live: list[tuple[int, float, int, Span]] = []  # heap: highest level first, then the latest begin
    coming = 0
    for left, right in pairwise(edges):
        while coming < len(order) and order[coming].begin <= left:
            span = order[coming]
            heapq.heappush(live, (-span.level, -span.begin, -coming, span))
            coming += 1
        while live and live[0][3].end <= left:
            heapq.heappop(live)
        kind = live[0][3].kind if live else "idle"
        if parts and parts[-1].kind == kind:
            parts[-1] = Span(parts[-1].begin, right, kind)
        else:
            parts.append(Span(left, right, kind))
    return parts


def _clip(span: Span, begin: float, end: float) -> Span:
    if begin <= span.begin and span.end <= end:
        return span
    return Span(max(span.begin, begin), min(span.end, end), span.kind, span.level)


def sum_seconds(parts: Iterable[Span]) -> dict[str, float]:
    """Return the seconds of each kind in `KINDS`, 0 for a kind without a span."""
    sums = dict.fromkeys(KINDS, 0.0)
    for part in parts:
        sums[part.kind] += part.end - part.begin
    return sums
