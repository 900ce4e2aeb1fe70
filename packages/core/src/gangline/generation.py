"""A generation: which start of its ranks a run is in, counted from 1 over the whole life of the run directory.

Whoever starts the ranks counts, and every member of the start is told the same number at the rendezvous; an agent's own
count of restarts is no such number, for members come and go. Torch-free.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

VARIABLE = "GANGLINE_GENERATION"


def generation(environ: Mapping[str, str] = os.environ) -> int:
    """Of this rank; where an agent that is not ours started it, its count of restarts is all there is."""
    return int(environ.get(VARIABLE) or int(environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + 1)
