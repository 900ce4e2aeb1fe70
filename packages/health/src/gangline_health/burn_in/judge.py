"""Evaluation of burn-in: bad ranks, slow links, and a cluster file from the measurements. Torch-free, pure functions.

Each rank is compared with the median of all ranks, because the machines of a job have the same hardware.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from gangline.explain.topology import Topology
from gangline_basics.cluster.file import Cluster, Quantity
from gangline_health.burn_in.config import BurnInHealth

MOST_SHARE = 0.9  # maximum tolerance: a rank below a tenth of the median is bad on any machine


@dataclass(frozen=True)
class RankRates:
    """Measurements of one rank. Rates are in operations (matmul, small_matmul) or bytes per second.

    memory_bytes  memory of the rank's device; latency: seconds of a small message
    sent          bandwidth to each peer, by the peer's rank
    all_reduce    bandwidth of an all-reduce over all ranks
    to_node, to_others  bandwidth of an all-to-all inside the node, and between nodes; 0 without a peer there
    wrong         names of computations with a wrong result
    """

    rank: int
    node: str
    matmul: float
    small_matmul: float
    memory: float
    latency: float
    memory_bytes: float
    all_reduce: float = 0.0
    to_node: float = 0.0
    to_others: float = 0.0
    sent: dict[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> RankRates:
        return cls(**{**content, "wrong": tuple(content["wrong"])})


@dataclass(frozen=True)
class BadRank:
    """Bad rank, with the evidence against it."""

    rank: int
    node: str
    why: tuple[str, ...]


def find_bad_ranks(rows: Sequence[RankRates], options: BurnInHealth, on_cpu: bool) -> list[BadRank]:
    """Return the ranks whose rates are far below the median of all ranks, and the ranks with a wrong result."""
    against: dict[int, list[str]] = {row.rank: [f"wrong result of {what}" for what in row.wrong] for row in rows}
    for name, share, unit in (("matmul", options.matmul, "TFLOP/s"), ("memory", options.memory, "GB/s")):
        scale = 1e12 if name == "matmul" else 1e9
        rates = {row.rank: getattr(row, name) for row in rows}
        for rank, rate, middle in find_below(rates, compute_tolerance(share, options, on_cpu)):
            against[rank].append(f"{name} {rate / scale:.3g} {unit}, the median is {middle / scale:.3g}")
    for tier in ("node", "cluster"):
        rates = {
            row.rank: statistics.median(peer_rates)
            for row in rows
            if (peer_rates := list(select_sent(row, rows, tier).values()))
        }
        for rank, rate, middle in find_below(rates, compute_tolerance(options.link, options, on_cpu)):
            where = "within its node" if tier == "node" else "to other nodes"
            against[rank].append(f"sends {rate / 1e9:.3g} GB/s {where}, the median is {middle / 1e9:.3g}")
    nodes = {row.rank: row.node for row in rows}
    return [BadRank(rank, nodes[rank], tuple(why)) for rank, why in against.items() if why]


def find_slow_links(rows: Sequence[RankRates], options: BurnInHealth, on_cpu: bool) -> list[str]:
    """Return a line of text for each slow pair of ranks, without pairs that include a bad rank."""
    bad = {one.rank for one in find_bad_ranks(rows, options, on_cpu)}
    links = []
    for tier in ("node", "cluster"):
        rates = {
            (row.rank, peer): rate
            for row in rows
            for peer, rate in select_sent(row, rows, tier).items()
            if row.rank < peer and not {row.rank, peer} & bad
        }
        middle = statistics.median(rates.values()) if rates else 0.0
        for (one, other), rate in rates.items():
            if rate < (1 - compute_tolerance(options.link, options, on_cpu)) * middle:
                links.append(f"rank {one} to rank {other}: {rate / 1e9:.3g} GB/s, the median is {middle / 1e9:.3g}")
    return links


def compute_tolerance(share: float, options: BurnInHealth, on_cpu: bool) -> float:
    return max(share, min(share * options.shared, MOST_SHARE)) if on_cpu else share


def find_below(rates: dict[int, float], share: float) -> list[tuple[int, float, float]]:
    """Return (rank, its rate, median rate) for each rank with a rate below (1 - share) times the median."""
    if len(rates) < 2:
        return []
    middle = statistics.median(rates.values())
    return [(rank, rate, middle) for rank, rate in rates.items() if rate < (1 - share) * middle]


def select_sent(row: RankRates, rows: Sequence[RankRates], tier: str) -> dict[int, float]:
    """Return the bandwidth of a rank to each peer, by rank: peers on its node for tier "node", else on other nodes."""
    nodes = {other.rank: other.node for other in rows}
    return {int(peer): rate for peer, rate in row.sent.items() if (nodes[int(peer)] == row.node) == (tier == "node")}


def build_cluster(rows: Sequence[RankRates], base: Cluster, about: str, when: str, small_size: int) -> Cluster:
    """Return the content of a cluster file: the measured numbers, and all other numbers from `base`.

    small_size  number of rows of the small square matmul
    """
    by = f"measured by burn-in, {when}, {about}"
    rate, small = (statistics.median(getattr(row, name) for row in rows) for name in ("matmul", "small_matmul"))
    inside = [value for row in rows for value in select_sent(row, rows, "node").values()]
    beyond = [value for row in rows for value in select_sent(row, rows, "cluster").values()]
    numbers = {
        name: replace(quantity, source=f"not measured; from {base.name}: {quantity.source}")
        for name, quantity in base.numbers.items()
        if not name.startswith(("peak.", "price.", "watts", "failure.", "storage.", "matmul.efficiency_"))
    }
    measurements = {
        "memory.bytes": min(row.memory_bytes for row in rows),
        "memory.bandwidth": statistics.median(row.memory for row in rows),
        "memory.efficiency": 1.0,
        "peak.bf16": rate,
        "matmul.efficiency": 1.0,
        "jitter.sigma": statistics.pstdev(row.matmul for row in rows) / rate if len(rows) > 1 else 0.0,
    }
    if small < rate:  # model: a matmul takes (operations + matmul.half) / rate seconds
        measurements["matmul.half"] = (rate / small - 1) * 2 * small_size**3
    if both := inside or beyond:
        whole = [row.all_reduce for row in rows if row.all_reduce]
        measurements["link.node.bandwidth"] = statistics.median(inside or both)
        measurements["link.cluster.bandwidth"] = statistics.median(beyond or both)
        measurements["link.node.latency"] = measurements["link.cluster.latency"] = statistics.median(
            row.latency for row in rows
        )
        slowest = min(measurements["link.node.bandwidth"], measurements["link.cluster.bandwidth"])
        if whole:
            measurements["link.node.efficiency"] = min(1.0, statistics.median(whole) / slowest)
            measurements["link.cluster.efficiency"] = measurements["link.node.efficiency"]
    numbers |= {name: Quantity(float(value), by) for name, value in measurements.items()}
    nodes = {row.node for row in rows}
    topology = Topology(gpus_per_node=max(1, len(rows) // len(nodes)), nodes_per_rack=base.topology.nodes_per_rack)
    return Cluster(base.name, about, topology, numbers)
