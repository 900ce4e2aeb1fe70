"""Error of predicted step times on published runs, by cross-validation of the cluster files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).parent / "accuracy.json"  # written by benchmarks/planner_fit.py --cross


@cache
def load_accuracy() -> Mapping[str, float]:
    """Return the errors of predicted step times on published runs; each table is predicted by a fit on the others.

    Keys: `rows` (number of runs), `tables`, the distribution of errors (`median`, `ninetieth`, `bias`), and the drift
    of errors over the number of GPUs (`slope`, `slope_low`, `slope_high`).
    """
    stats: Mapping[str, float] = json.loads(FILE.read_text(encoding="utf-8"))
    return stats


def describe_expected_error() -> str:
    """Return a line of text on the expected error of a predicted step time."""
    stats = load_accuracy()
    side = "short" if stats["bias"] < 0 else "long"
    return (
        f"expected error of the step time: median {stats['median']:.0%}, 90th percentile {stats['ninetieth']:.0%}, "
        f"{abs(stats['bias']):.0%} too {side} on average (cross-validation: {stats['rows']:.0f} published runs, "
        f"{stats['tables']:.0f} tables, each predicted by a fit on the other tables)"
    )
