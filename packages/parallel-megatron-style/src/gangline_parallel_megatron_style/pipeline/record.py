"""Recorded times of pipeline actions in a real step: written as metrics, and read back from metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from gangline_parallel_megatron_style.pipeline.actions import Schedule
from gangline_parallel_megatron_style.pipeline.simulate import Span, Timeline

if TYPE_CHECKING:
    import torch

    from gangline.comm.base import Comm

SPANS, BUBBLE = "pipeline/spans", "pipeline/bubble"


def as_metrics(
    spans: Sequence[Span], schedule: Schedule, index: int, speaks: bool, world: Comm, device: torch.device
) -> dict[str, float | list[float]]:
    """Return metrics, equal on all ranks: the action times of the mesh's first pipeline, and the pipeline's bubble.

    Action times are (start, end) pairs, flattened, rank by rank, in seconds since the start of the first action.
    index   this rank's index in its pipeline
    speaks  whether this rank's pipeline is the first of the mesh
    """
    import torch

    counts = [len(order) for order in schedule.actions]
    every = torch.zeros(sum(counts), 2, dtype=torch.float64, device=device)
    if speaks:
        first = sum(counts[:index])
        every[first : first + counts[index]] = torch.tensor(spans, dtype=torch.float64, device=device)
    world.all_reduce(every)
    every -= every[:, 0].min()
    flat: list[float] = every.flatten().tolist()
    return {SPANS: flat, BUBBLE: make_timeline(flat, schedule).bubble}


def make_timeline(flat: Sequence[float], schedule: Schedule) -> Timeline:
    """Return a timeline from the flat spans of `as_metrics`. Raises ValueError if their number does not fit."""
    counts = [len(order) for order in schedule.actions]
    if len(flat) != 2 * sum(counts):
        raise ValueError(f"{len(flat) // 2} actions are recorded, but the schedule has {sum(counts)} actions")
    pairs = iter(zip(flat[::2], flat[1::2], strict=True))
    return Timeline(schedule, tuple(tuple(next(pairs) for _ in range(count)) for count in counts))


def find_latest(records: Sequence[dict[str, Any]]) -> tuple[int, list[float]] | None:
    """Return (step, spans) of the newest metrics record that has spans; None if no record has spans."""
    for record in reversed(records):
        spans = record.get("metrics", {}).get(SPANS)
        if spans:
            return record["step"], spans
    return None
