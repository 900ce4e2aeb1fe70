"""Load of a run's experts at each step, read from the run's metrics. Torch-free."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from gangline import UserError
from gangline.record import read_records

LOAD = "/load"


@dataclass(frozen=True)
class StepLoads:
    """Loads of one step: `loads` is layer path -> load per expert; `numbers` are the scalar metrics."""

    step: int
    loads: dict[str, list[float]]
    numbers: dict[str, float]


def get_loads(metrics: Mapping[str, object]) -> dict[str, list[float]]:
    """Return layer -> number of (token, expert) pairs per expert, without layers that got no tokens."""
    return {
        name.removesuffix(LOAD): list(load)
        for name, load in metrics.items()
        if name.endswith(LOAD) and isinstance(load, list) and sum(load) > 0
    }


def compute_imbalance(metrics: Mapping[str, object]) -> dict[str, float]:
    """Return each layer's imbalance, largest load / mean load, and their maximum as "moe/imbalance"."""
    each = {f"{layer}/imbalance": max(load) * len(load) / sum(load) for layer, load in get_loads(metrics).items()}
    return {**each, "moe/imbalance": max(each.values())} if each else {}


def load_history(run_dir: str | Path, report: Callable[[str], object] = warnings.warn) -> list[StepLoads]:
    """Load the expert loads of a run's steps in order, without steps that a later rollback replaced.

    Calls `report` with a message if steps are missing. Raises UserError if no step has expert loads.
    """
    path = Path(run_dir) / "metrics.jsonl"
    try:
        records = read_records(path, report)
    except OSError:
        raise UserError(
            f"{run_dir}/metrics.jsonl is missing or cannot be read.",
            "The report reads the metrics of each step from this file.",
            "Train with track=[jsonl,...]; the default includes jsonl.",
        ) from None
    by_step: dict[int, StepLoads] = {}
    for record in records:
        metrics = record.get("metrics") or {}
        loads = get_loads(metrics)
        if loads:
            numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            by_step[record["step"]] = StepLoads(record["step"], loads, numbers)
    if not by_step:
        raise UserError(
            f"{run_dir}/metrics.jsonl has no step with the load of experts.",
            "A layer with experts records its load in every step.",
        )
    return [by_step[step] for step in sorted(by_step)]


def compute_shares(steps: list[StepLoads], layer: str) -> list[float]:
    """Return each expert's load summed over `steps`, divided by the mean over experts: 1 means balanced."""
    totals = [sum(column) for column in zip(*(step.loads[layer] for step in steps if layer in step.loads), strict=True)]
    mean = sum(totals) / len(totals)
    return [total / mean for total in totals]


def list_layers(steps: list[StepLoads]) -> list[str]:
    """Return the paths of all MoE layers, in the order of the model."""
    layers = {layer for step in steps for layer in step.loads}
    return sorted(layers, key=lambda name: [int(part) if part.isdigit() else -1 for part in name.split(".")])


def split_steps(steps: list[StepLoads], count: int) -> list[list[StepLoads]]:
    """Split `steps` into at most `count` ranges of nearly equal length."""
    count = min(count, len(steps))
    edges = [len(steps) * i // count for i in range(count + 1)]
    return [steps[start:stop] for start, stop in pairwise(edges)]
