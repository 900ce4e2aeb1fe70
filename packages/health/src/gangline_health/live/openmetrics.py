"""OpenMetrics of a run: its status as metric families of prometheus_client. Torch-free; needs the extra `metrics`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from gangline_health.live.status import RunFollower, Status

# field of the newest step record -> (name of the metric, help text)
GAUGES = {
    "step": ("gangline_step", "number of the newest step"),
    "loss": ("gangline_loss", "mean loss of the newest step, nats"),
    "validation_loss": ("gangline_validation_loss", "validation loss of the newest step, if it had a validation"),
    "grad_norm": ("gangline_grad_norm", "global gradient norm before clipping"),
    "learning_rate": ("gangline_learning_rate", "learning rate of the newest step"),
    "tokens_per_second": ("gangline_tokens_per_second", "tokens per second over all ranks"),
    "mfu": ("gangline_mfu_ratio", "model FLOPs utilization: model FLOPs over the peak of all devices"),
    "step_seconds": ("gangline_step_seconds", "wall time of the newest step in seconds"),
    "memory_bytes": ("gangline_memory_bytes", "peak memory of rank 0 in bytes"),
    "attempt": ("gangline_attempt", "1, plus 1 for each rollback"),
    "generation": ("gangline_generation", "number of starts of the ranks over all jobs of the run"),
}


class RunCollector(Collector):
    """Collector of the metrics of one run. Each scrape reads the lines that the run wrote since the last scrape."""

    def __init__(self, run_dir: Path) -> None:
        self._follower, self._lock = RunFollower(run_dir), threading.Lock()

    def collect(self) -> Iterable[Metric]:
        with self._lock:
            return list(_make_families(self._follower.look()))


def _make_families(status: Status) -> Iterator[Metric]:
    def make_family(
        kind: Callable[..., Any], name: str, about: str, rows: Iterable[tuple[Any, ...]], *labels: str
    ) -> Any:
        """Return a metric family with one sample per row; a row is (values of the labels..., value of the sample)."""
        family = kind(name, about, labels=("run", *labels))
        for *values, number in rows:
            family.add_metric([status.name, *map(str, values)], number)
        return family

    gauge, counter = partial(make_family, GaugeMetricFamily), partial(make_family, CounterMetricFamily)
    record = status.record or {}
    for field, (name, about) in GAUGES.items():
        if (value := _parse_number(record.get(field))) is not None:
            yield gauge(name, about, [(value,)])
    if status.steps is not None:
        yield gauge("gangline_steps_planned", "planned number of steps of the run", [(status.steps,)])
    if status.quiet_seconds is not None:
        yield gauge("gangline_quiet_seconds", "seconds since the newest step", [(status.quiet_seconds,)])
    yield gauge("gangline_ranks_here", "running ranks on this machine", [(len(status.ranks),)])
    if phases := record.get("rank_phases"):
        rows = [(rank, phase, value) for phase, values in phases.items() for rank, value in enumerate(values)]
        yield gauge(
            "gangline_rank_phase_seconds",
            "seconds of each phase in the newest step, without waits for other ranks",
            rows,
            "rank",
            "phase",
        )
    if shares := record.get("rank_mfu"):
        about = "FLOPs of the rank's own work over the peak of one device"
        yield gauge("gangline_rank_mfu_ratio", about, enumerate(shares), "rank")
    yield counter("gangline_launches", "number of starts of the ranks", [(status.launches,)])
    yield counter("gangline_verdicts", "number of verdicts of health checks", sorted(status.counted.items()), "kind")
    yield counter("gangline_responses", "number of responses to verdicts", sorted(status.responses.items()), "action")


def _parse_number(value: Any) -> float | None:
    """Return the field of a record as a float, also from "nan" and "inf"; None if it is missing or not a number."""
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        return None
