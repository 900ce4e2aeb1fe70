"""Which published rows the numbers of the shipped cluster files were fitted on, and how far off they are elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "calibrated.json"
WHICH = (  # what makes a row that one and no other: the run, and what was published of it
    "table",
    "model",
    "params_b",
    "gpu",
    "n_gpus",
    "tp",
    "pp",
    "cp",
    "ep",
    "vp",
    "fsdp",
    "micro_batch",
    "global_batch",
    "local_batch",
    "seq",
    "precision",
    "technique",
    "recompute",
    "step_time_s",
    "tokens_per_s_per_gpu",
    "tflops_per_gpu",
)


def identity(row: Mapping[str, Any]) -> str:
    """Of a row, whatever file it is in and whatever number it has there."""
    said = {name: float(value) if isinstance(value := row.get(name), int) else value for name in WHICH}
    return sha256(json.dumps(said, sort_keys=True, default=str).encode()).hexdigest()[:12]


@cache
def _kept() -> Mapping[str, Any]:
    found: Mapping[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


@cache
def calibrated_rows() -> frozenset[str]:
    """Identities of those that were fitted on; errors on them say little."""
    return frozenset(_kept()["rows"].values())


def elsewhere() -> Mapping[str, float]:
    """Of the same rows, each table judged by a fit on the others: `rows`, `tables`, `median`, `ninetieth`, `bias`,
    `slope`, `slope_low`, `slope_high` as `gangline_planner.judge.summary` has them.
    """
    found: Mapping[str, float] = _kept()["elsewhere"]
    return found


def expected_error() -> str:
    """Return the error of a predicted step time to expect, as a line for people."""
    found = elsewhere()
    side = "short" if found["bias"] < 0 else "long"
    return (
        f"expected error of the step time: {found['median']:.0%} median, {found['ninetieth']:.0%} in the worst tenth, "
        f"{abs(found['bias']):.0%} too {side} on average ({found['rows']:.0f} published runs, "
        f"{found['tables']:.0f} tables, each predicted by a fit on the others)"
    )
