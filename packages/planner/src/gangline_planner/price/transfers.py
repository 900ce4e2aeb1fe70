"""How long a collective takes: bytes over the slowest links that it crosses, and a latency for each round.

Ranks of one node that take part together share that node's links to others, so a ring over k ranks of each node moves
as fast as k links (the rails of a fat tree). Rings and trees: Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005.
"""

from __future__ import annotations

from math import ceil, log2

from gangline.cluster import Cluster
from gangline.explain import Transfer


def transfer_seconds(sent: Transfer, cluster: Cluster) -> float:
    """All calls of a step, one after the other, with nothing beside them."""
    if sent.ranks < 2 or not sent.calls:
        return 0.0
    inside = cluster["link.node.bandwidth"] * cluster["link.node.efficiency"]
    beyond = cluster["link.cluster.bandwidth"] * cluster["link.cluster.efficiency"]
    local = sent.tier == "node"
    latency = cluster["link.node.latency" if local else "link.cluster.latency"]
    rounds = 1 if sent.operation == "send" else ceil(log2(sent.ranks))
    if sent.operation == "all_reduce":
        rounds *= 2
    return sent.calls * rounds * latency + _seconds_of_bytes(sent, local, inside, beyond)


def _seconds_of_bytes(sent: Transfer, local: bool, inside: float, beyond: float) -> float:
    if local:
        return sent.bytes / inside
    if sent.operation == "send":
        return sent.bytes / beyond
    if sent.operation == "all_to_all":  # to each peer its own part: those beyond the node by this rank's own link
        outside = (sent.ranks - sent.each_node) / (sent.ranks - 1)
        return sent.bytes * max(outside / beyond, (1 - outside) / inside)
    return sent.bytes / min(inside, beyond * sent.each_node)
