"""Peers: ranks that do equal work, because they have the same pipeline stage. Other stages may take longer.

Torch-free.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Peers:
    """Groups of ranks that do equal work. stages: pipeline stage of each rank; empty: all ranks are one group."""

    stages: tuple[int, ...] = ()

    def find_peers(self, rank: int, ranks: int) -> list[int]:
        """Return the peers of `rank` among `ranks` ranks, with `rank` itself."""
        if len(self.stages) != ranks:
            return list(range(ranks))
        return [other for other, stage in enumerate(self.stages) if stage == self.stages[rank]]

    def compute_peer_medians(self, values: Sequence[float]) -> list[float]:
        """Return for each rank the median of its group's values, (ranks,); in a group of two ranks, the minimum."""
        stages = self.stages if len(self.stages) == len(values) else (0,) * len(values)
        medians = {}
        for stage in set(stages):
            peers = [value for value, one in zip(values, stages, strict=True) if one == stage]
            medians[stage] = min(peers) if len(peers) == 2 else statistics.median(peers)
        return [medians[stage] for stage in stages]
