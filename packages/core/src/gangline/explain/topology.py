"""The network as tiers: links inside a node, inside a rack, inside a datacentre, and the fibre between these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import Literal

from gangline.config.ranges import PositiveFloat, PositiveInt
from gangline.mesh import Mesh

Tier = Literal["self", "node", "rack", "cluster", "fibre"]


ALL = 1 << 62  # more ranks than there are


@dataclass
class Topology:
    """How ranks are connected; neighbouring ranks share a node. The defaults are 8 H100s with NVLink and one 400 Gb/s
    link each.
    """

    gpus_per_node: PositiveInt = 8  # ranks that share a node
    nodes_per_rack: PositiveInt = 4  # nodes behind one switch
    nodes_per_datacentre: PositiveInt | None = None  # nodes between which no fibre lies; null: all
    node_bandwidth: PositiveFloat = 450.0  # GB/s that a rank sends inside its node
    rack_bandwidth: PositiveFloat = 50.0  # GB/s that a rank sends to another node of its rack
    cluster_bandwidth: PositiveFloat = 50.0  # GB/s that a rank sends beyond its rack
    fibre_bandwidth: PositiveFloat = 5.0  # GB/s that a rank sends to another datacentre, where there are several

    @property
    def domains(self) -> tuple[tuple[Tier, int], ...]:
        """(tier, how many neighbouring ranks it connects), the fastest first; what connects all has 2^62 of them."""
        nodes = self.nodes_per_datacentre
        return (
            ("node", self.gpus_per_node),
            ("rack", self.gpus_per_node * self.nodes_per_rack),
            ("cluster", self.gpus_per_node * nodes if nodes else ALL),
        )

    def find_tier_of(self, ranks: Sequence[int]) -> Tier:
        """The slowest links between any two of `ranks`."""
        if len(set(ranks)) < 2:
            return "self"
        return next((tier for tier, size in self.domains if len({rank // size for rank in ranks}) == 1), "fibre")

    def find_tier(self, mesh: Mesh, *axes: str) -> Tier:
        """The slowest links that any group along `axes` uses: groups that straddle two nodes count as such."""
        if mesh.size(*axes) == 1:
            return "self"
        return _find_tier(self.domains, mesh, axes)

    def find_slowest(self, groups: Iterable[Sequence[int]]) -> Tier:
        """The slowest links that any of these groups of ranks uses."""
        order: list[Tier] = ["self", "node", "rack", "cluster", "fibre"]
        slowest, last = 0, order.index("fibre" if self.nodes_per_datacentre else "cluster")
        for ranks in groups:
            slowest = max(slowest, order.index(self.find_tier_of(ranks)))
            if slowest == last:
                break
        return order[slowest]

    def get_bandwidth(self, tier: Tier) -> float:
        """Bytes a second that a rank sends over a tier."""
        bandwidths = {"node": self.node_bandwidth, "rack": self.rack_bandwidth, "cluster": self.cluster_bandwidth}
        bandwidths["fibre"] = self.fibre_bandwidth
        return bandwidths[tier] * 1e9 if tier in bandwidths else float("inf")


@lru_cache(maxsize=4096)
def _find_tier(domains: tuple[tuple[Tier, int], ...], mesh: Mesh, axes: tuple[str, ...]) -> Tier:
    """A group begins at the sum of steps along the other axes and ends `reach` ranks behind: where it begins within
    each domain is all that matters, and these are few places even where the groups are thousands.
    """
    every = lcm(*(size for _, size in domains if size != ALL))
    step, reach, starts = 1, 0, {0}
    for axis, size in reversed(mesh.sizes):
        if axis in axes:
            reach += (size - 1) * step
        else:
            turns = min(size, every // gcd(step, every))
            starts = {(start + turn * step) % every for start in starts for turn in range(turns)}
        step *= size
    fitting = (tier for tier, size in domains if all(start % size + reach < size for start in starts))
    return next(fitting, "fibre")
