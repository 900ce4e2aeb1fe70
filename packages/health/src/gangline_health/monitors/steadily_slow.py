"""Detection of ranks that are a few percent slower all the time: too little to be an outlier of any one step.

A steady few percent of one rank are a few percent of the whole job. Noise has both signs; so a rank counts if it was
that much slower than the median rank of its stage in each of ten consecutive stretches. Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from gangline_health.monitors.peers import Peers

STRETCHES = 10


@dataclass
class SlowRanks:
    """Seconds of own work by step and rank in the current stretch, and the slow ranks of earlier stretches."""

    slower: float  # multiple of the median rank, in each stretch
    steps: int  # number of steps of all stretches together
    peers: Peers = field(default_factory=Peers)
    rows: list[Sequence[float]] = field(default_factory=list)
    slow: list[dict[int, float]] = field(default_factory=list)  # for each stretch: rank -> multiple of the median rank

    def add(self, own: Sequence[float]) -> dict[int, float]:
        """Add the seconds of one step, (ranks,); return {rank: multiple of the median rank} of ranks found with it."""
        if self.rows and len(self.rows[0]) != len(own):
            self.rows, self.slow = [], []
        self.rows.append(own)
        if len(self.rows) < self.steps // STRETCHES:
            return {}
        each = [statistics.median(column) for column in zip(*self.rows, strict=True)]
        usual = self.peers.compute_peer_medians(each)
        self.rows = []
        shares = {rank: seconds / usual[rank] for rank, seconds in enumerate(each) if usual[rank] > 0}
        self.slow = [*self.slow, {rank: share for rank, share in shares.items() if share >= self.slower}][-STRETCHES:]
        if len(self.slow) < STRETCHES:
            return {}
        steady = set.intersection(*(set(one) for one in self.slow))
        slow_ranks = {rank: statistics.median(one[rank] for one in self.slow) for rank in sorted(steady)}
        if slow_ranks:
            self.slow = []  # reported again after as many steps
        return slow_ranks
