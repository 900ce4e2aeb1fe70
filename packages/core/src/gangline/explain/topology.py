"""Network topology as tiers: links inside a node, a rack and a datacentre, and the fibre between datacentres."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, lcm
from typing import Literal

from gangline.config.ranges import PositiveFloat, PositiveInt
from gangline.mesh import Mesh

Tier = Literal["self", "node", "rack", "cluster", "fibre"]


ALL = 1 << 62  # number of ranks in an unlimited tier


@dataclass
class Topology:
    """Network between ranks; neighbouring ranks share a node. The defaults are 8 H100s per node with NVLink and one
    400 Gb/s link per GPU.
    """

    gpus_per_node: PositiveInt = 8  # number of GPUs per node
    nodes_per_rack: PositiveInt = 4  # number of nodes per rack, connected to the same switch
    nodes_per_datacentre: PositiveInt | None = None  # number of nodes per datacentre; null: all nodes in one datacentre
    node_bandwidth: PositiveFloat = 450.0  # send bandwidth per GPU within its node (NVLink), in GB/s
    rack_bandwidth: PositiveFloat = 50.0  # send bandwidth per GPU to other nodes of its rack, in GB/s
    cluster_bandwidth: PositiveFloat = 50.0  # send bandwidth per GPU to other racks, in GB/s
    fibre_bandwidth: PositiveFloat = 5.0  # send bandwidth per GPU to another datacentre over fibre, in GB/s

    @property
    def domains(self) -> tuple[tuple[Tier, int], ...]:
        """(tier, number of neighbouring ranks that the tier connects), fastest tier first; 2^62 for all ranks."""
        nodes = self.nodes_per_datacentre
        return (
            ("node", self.gpus_per_node),
            ("rack", self.gpus_per_node * self.nodes_per_rack),
            ("cluster", self.gpus_per_node * nodes if nodes else ALL),
        )

    def find_tier_of(self, ranks: Sequence[int]) -> Tier:
        """Return the slowest tier between any two of `ranks`."""
        if len(set(ranks)) < 2:
            return "self"
        return next((tier for tier, size in self.domains if len({rank // size for rank in ranks}) == 1), "fibre")

    def find_tier(self, mesh: Mesh, *axes: str) -> Tier:
        """Return the slowest tier that any group along `axes` uses."""
        if mesh.size(*axes) == 1:
            return "self"
        return _find_tier(self.domains, mesh, axes)

    def find_slowest(self, groups: Iterable[Sequence[int]]) -> Tier:
        """Return the slowest tier that any group of ranks in `groups` uses."""
        order: list[Tier] = ["self", "node", "rack", "cluster", "fibre"]
        slowest, last = 0, order.index("fibre" if self.nodes_per_datacentre else "cluster")
        for ranks in groups:
            slowest = max(slowest, order.index(self.find_tier_of(ranks)))
            if slowest == last:
                break
        return order[slowest]

    def get_bandwidth(self, tier: Tier) -> float:
        """Return the send bandwidth per rank over a tier, in bytes per second."""
        bandwidths = {"node": self.node_bandwidth, "rack": self.rack_bandwidth, "cluster": self.cluster_bandwidth}
        bandwidths["fibre"] = self.fibre_bandwidth
        return bandwidths[tier] * 1e9 if tier in bandwidths else float("inf")


@lru_cache(maxsize=4096)
def _find_tier(domains: tuple[tuple[Tier, int], ...], mesh: Mesh, axes: tuple[str, ...]) -> Tier:
    """Return the slowest tier of groups along `axes`. A group begins at a sum of steps along the other axes and ends
    `reach` ranks later. Only the start modulo the domain sizes matters: few values even for thousands of groups.
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
