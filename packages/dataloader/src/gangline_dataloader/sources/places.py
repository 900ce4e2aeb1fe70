"""Where rows lie in the stores that they are read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Windows:
    """Where the windows (N,) of some samples begin: number of the source, number of the first token in it."""

    source: np.ndarray
    start: np.ndarray
