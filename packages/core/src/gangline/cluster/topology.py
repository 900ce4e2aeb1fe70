"""The network as tiers: links inside a node, inside a rack, and beyond."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Literal

from gangline.mesh import Mesh
from gangline.ranges import PositiveFloat, PositiveInt

Tier = Literal["self", "node", "rack", "cluster"]


@dataclass
class Topology:
    """How ranks are connected; neighbouring ranks share a node. The defaults are 8 H100s with NVLink and one 400 Gb/s
    link each.
    """

    gpus_per_node: PositiveInt = 8  # ranks that share a node
    nodes_per_rack: PositiveInt = 4  # nodes behind one switch
    node_bandwidth: PositiveFloat = 450.0  # GB/s that a rank sends inside its node
    rack_bandwidth: PositiveFloat = 50.0  # GB/s that a rank sends to another node of its rack
    cluster_bandwidth: PositiveFloat = 50.0  # GB/s that a rank sends beyond its rack

    def tier_of(self, ranks: Sequence[int]) -> Tier:
        """The slowest links between any two of `ranks`."""
        rack = self.gpus_per_node * self.nodes_per_rack
        if len(set(ranks)) < 2:
            return "self"
        if len({rank // self.gpus_per_node for rank in ranks}) == 1:
            return "node"
        return "rack" if len({rank // rack for rank in ranks}) == 1 else "cluster"

    def tier(self, mesh: Mesh, *axes: str) -> Tier:
        """The slowest links that any group along `axes` uses: groups that straddle two nodes count as such."""
        if mesh.size(*axes) == 1:
            return "self"
        return _tier(self.gpus_per_node, self.nodes_per_rack, mesh, axes)

    def slowest(self, groups: Iterable[Sequence[int]]) -> Tier:
        """The slowest links that any of these groups of ranks uses."""
        order: list[Tier] = ["self", "node", "rack", "cluster"]
        slowest = 0
        for ranks in groups:
            slowest = max(slowest, order.index(self.tier_of(ranks)))
            if order[slowest] == "cluster":
                break
        return order[slowest]

    def bandwidth(self, tier: Tier) -> float:
        """Bytes a second that a rank sends over a tier."""
        found = {"node": self.node_bandwidth, "rack": self.rack_bandwidth, "cluster": self.cluster_bandwidth}
        return found[tier] * 1e9 if tier in found else float("inf")


@lru_cache(maxsize=4096)
def _tier(gpus_per_node: int, nodes_per_rack: int, mesh: Mesh, axes: tuple[str, ...]) -> Tier:
    """A group begins at the sum of steps along the other axes and ends `reach` ranks behind: where it begins within a
    node and within a rack is all that matters, and these are few places even where the groups are thousands.
    """
    rack = gpus_per_node * nodes_per_rack
    step, reach, starts = 1, 0, {0}
    for axis, size in reversed(mesh.sizes):
        if axis in axes:
            reach += (size - 1) * step
        else:
            turns = min(size, rack // gcd(step, rack))
            starts = {(start + turn * step) % rack for start in starts for turn in range(turns)}
        step *= size
    if all(start % gpus_per_node + reach < gpus_per_node for start in starts):
        return "node"
    return "rack" if all(start + reach < rack for start in starts) else "cluster"
