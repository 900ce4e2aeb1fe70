"""Detection of ranks that are always a few percent slower, which is too little for an outlier in any step.

A rank that is steadily a few percent slower delays the job by the same percentage. Noise has both signs, so a rank is
slow if it was slower than the median rank of its stage in each of ten consecutive windows of steps. Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from gangline_health.monitors.peers import Peers

STRETCHES = 10  # number of windows that `steps` are split into


@dataclass
class SlowRanks:
    """Detector of steadily slow ranks. rows: seconds by step and rank in the current window."""

    min_ratio: float  # minimum ratio of a rank's median step time to its stage's median, in each window
    steps: int  # number of steps in all windows together
    peers: Peers = field(default_factory=Peers)
    rows: list[Sequence[float]] = field(default_factory=list)
    # for each window: slow rank -> ratio of its median step time to its stage's median
    slow: list[dict[int, float]] = field(default_factory=list)

    def add(self, own: Sequence[float]) -> dict[int, float]:
        """Add the seconds of each rank in a step, (ranks,); return {slow rank: ratio to its stage's median}."""
        if self.rows and len(self.rows[0]) != len(own):
            self.rows, self.slow = [], []
        self.rows.append(own)
        if len(self.rows) < self.steps // STRETCHES:
            return {}
        each = [statistics.median(column) for column in zip(*self.rows, strict=True)]
        usual = self.peers.compute_peer_medians(each)
        self.rows = []
        shares = {rank: seconds / usual[rank] for rank, seconds in enumerate(each) if usual[rank] > 0}
        self.slow = [*self.slow, {rank: share for rank, share in shares.items() if share >= self.min_ratio}][
            -STRETCHES:
        ]
        if len(self.slow) < STRETCHES:
            return {}
        steady = set.intersection(*(set(one) for one in self.slow))
        slow_ranks = {rank: statistics.median(one[rank] for one in self.slow) for rank in sorted(steady)}
        if slow_ranks:
            self.slow = []  # a slow rank is reported again only after `steps` more steps
        return slow_ranks
