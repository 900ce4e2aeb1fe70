"""Which published tables the numbers of the shipped cluster files were fitted on."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path


@cache
def calibrated_tables() -> frozenset[str]:
    """Their names; errors on their rows say little."""
    return frozenset(json.loads((Path(__file__).parent / "calibrated.json").read_text())["tables"])
