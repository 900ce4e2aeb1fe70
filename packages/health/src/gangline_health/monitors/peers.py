"""Peers: ranks that do equal work, those of one pipeline stage. A longer stage, such as the head's, is no slow rank.

Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Peers:
    """Pipeline stage of each rank, `stages`; empty if all ranks do equal work."""

    stages: tuple[int, ...] = ()

    def find_peers(self, rank: int, ranks: int) -> list[int]:
        """Return which of `ranks` ranks do the work of `rank`, itself included."""
        if len(self.stages) != ranks:
            return list(range(ranks))
        return [other for other, stage in enumerate(self.stages) if stage == self.stages[rank]]

    def compute_peer_medians(self, values: Sequence[float]) -> list[float]:
        """Return for each rank the median seconds of its peers, (ranks,); of two the faster, of one its own."""
        stages = self.stages if len(self.stages) == len(values) else (0,) * len(values)
        medians = {}
        for stage in set(stages):
            peers = [value for value, one in zip(values, stages, strict=True) if one == stage]
            medians[stage] = min(peers) if len(peers) == 2 else statistics.median(peers)
        return [medians[stage] for stage in stages]
