"""A run's status as OpenMetrics text (https://prometheus.io/docs/specs/om/open_metrics_spec/). Torch-free."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gangline_health.live.status import Status

TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"
# of the newest record: field -> (name, unit's suffix, what it is)
GAUGES = {
    "step": ("gangline_step", "steps done"),
    "loss": ("gangline_loss", "mean loss of the newest step, nats"),
    "validation_loss": ("gangline_validation_loss", "where the newest step had one"),
    "grad_norm": ("gangline_grad_norm", "global gradient norm before clipping"),
    "learning_rate": ("gangline_learning_rate", "of the newest step"),
    "tokens_per_second": ("gangline_tokens_per_second", "all ranks"),
    "mfu": ("gangline_mfu_ratio", "model FLOPs over the peak of all devices"),
    "step_seconds": ("gangline_step_seconds", "wall time of the newest step"),
    "memory_bytes": ("gangline_memory_bytes", "peak of the first rank"),
    "attempt": ("gangline_attempt", "ways back, plus one"),
    "generation": ("gangline_generation", "starts of the ranks over the life of the run"),
}


def text(status: Status) -> str:
    """The whole exposition, with its end mark."""
    return "\n".join([*_lines(status), "# EOF", ""])


def _lines(status: Status) -> Iterator[str]:
    run = {"run": status.name}
    record = status.record or {}
    for field, (name, about) in GAUGES.items():
        if (value := _number(record.get(field))) is not None:
            yield from _family(name, "gauge", about, [(run, value)])
    if status.steps is not None:
        yield from _family("gangline_steps_planned", "gauge", "steps the run is to have", [(run, status.steps)])
    if status.quiet_seconds is not None:
        yield from _family("gangline_quiet_seconds", "gauge", "since the newest step", [(run, status.quiet_seconds)])
    yield from _family("gangline_ranks_here", "gauge", "living ranks of this machine", [(run, len(status.ranks))])
    phases = record.get("rank_phases") or {}
    rows = [
        ({**run, "rank": str(rank), "phase": phase}, value)
        for phase, values in phases.items()
        for rank, value in enumerate(values)
    ]
    if rows:
        yield from _family("gangline_rank_phase_seconds", "gauge", "of the newest step, without waits", rows)
    if shares := record.get("rank_mfu"):
        rows = [({**run, "rank": str(rank)}, share) for rank, share in enumerate(shares)]
        yield from _family("gangline_rank_mfu_ratio", "gauge", "of its own work, over the peak of one device", rows)
    yield from _family("gangline_launches", "counter", "starts of the ranks", [(run, status.launches)])
    kinds = [({**run, "kind": kind}, count) for kind, count in sorted(status.counted.items())]
    yield from _family("gangline_verdicts", "counter", "findings of health checks", kinds)
    actions = [({**run, "action": action}, count) for action, count in sorted(status.orders.items())]
    yield from _family("gangline_orders", "counter", "what was done about them", actions)


def _family(name: str, kind: str, about: str, rows: Sequence[tuple[Mapping[str, str], float]]) -> Iterator[str]:
    yield f"# TYPE {name} {kind}"
    yield f"# HELP {name} {about}"
    for labels, value in rows:
        inside = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        yield f"{name}{'_total' if kind == 'counter' else ''}{{{inside}}} {_written(value)}"


def _number(value: Any) -> float | None:
    """Also "nan" and "inf", as records have them."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None


def _written(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
