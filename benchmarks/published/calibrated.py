"""Identify the published rows to which the values of the shipped cluster files were fitted."""

from __future__ import annotations

import json
from functools import cache
from hashlib import sha256
from pathlib import Path

from published.row import Row

FILE = Path(__file__).parent / "calibrated.json"  # id of a row -> hash of the row
IDENTIFYING = (  # fields that identify a run, and its measured values
    *("table", "model", "params_b", "gpu", "n_gpus", "tp", "pp", "cp", "ep", "vp", "fsdp"),
    *("micro_batch", "global_batch", "local_batch", "seq", "precision", "technique", "recompute"),
    *("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu"),
)


def identity(row: Row) -> str:
    """Return a hash of a row. It depends neither on the row's file nor on the row's id."""
    fields = {name: float(value) if isinstance(value := row.get(name), int) else value for name in IDENTIFYING}
    return sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()[:12]


@cache
def calibrated_rows() -> frozenset[str]:
    """Return the hashes of the fitted rows. Errors on these rows say little about other runs."""
    return frozenset(json.loads(FILE.read_text(encoding="utf-8")).values())
