"""Ranks that are slower than the others by a few percent, all the time: too little to be an outlier of any one step.

A steady few percent of one rank are a few percent of the whole job. Noise has both signs; so a rank counts where it was
that much slower than the median rank of its stage in each of ten stretches that follow each other. Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from gangline_health.monitors.peers import Peers

STRETCHES = 10


@dataclass
class SlowRanks:
    """Seconds of own work of each rank, by step, in the stretch under way; who was slow in those before."""

    slower: float  # times the median rank, in each stretch
    steps: int  # of all stretches together
    peers: Peers = field(default_factory=Peers)
    rows: list[Sequence[float]] = field(default_factory=list)
    slow: list[dict[int, float]] = field(default_factory=list)  # of each stretch, rank -> times the median rank

    def add(self, own: Sequence[float]) -> dict[int, float]:
        """(ranks,) seconds of one step -> rank -> times the median rank, of those found with this step."""
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
            self.slow = []  # told again when as many steps have passed
        return slow_ranks
