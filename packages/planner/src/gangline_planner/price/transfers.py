"""How long a collective takes: bytes over the slowest links that it crosses, and a latency for each message on its way.

Ranks of one node that take part together share that node's links to others, so a ring over k ranks of each node moves
as fast as k links (the rails of a fat tree). Rings and trees: Thakur, Rabenseifner and Gropp, IJHPCA 19, 2005. The more
nodes a collective has, the more switches its messages cross and meet others in: with each doubling of the nodes it
takes `link.cluster.crowding` of its bytes' time more.
"""

from __future__ import annotations

from math import ceil, log2

from gangline.cluster import Cluster
from gangline.explain import Operation, Transfer


def transfer_seconds(sent: Transfer, cluster: Cluster) -> float:
    """All calls of a step, one after the other, with nothing beside them."""
    if sent.ranks < 2 or not sent.calls:
        return 0.0
    nodes = nodes_of(sent)
    inside, beyond = messages(sent.operation, sent.ranks, nodes)
    latency = inside * cluster["link.node.latency"] + beyond * cluster["link.cluster.latency"]
    return sent.calls * latency + _seconds_of_bytes(sent, nodes, cluster)


def nodes_of(sent: Transfer) -> int:
    """How many nodes take part in each."""
    return 1 if sent.tier == "node" else max(2, ceil(sent.ranks / sent.each_node))


def messages(operation: Operation, ranks: int, nodes: int = 1) -> tuple[int, int]:
    """(inside nodes, between them): messages of a call that wait for each other.

    What all get of all goes round a ring, from rank to rank; a sum that all get goes up a tree and down.
    """
    if operation == "send":
        return (1, 0) if nodes == 1 else (0, 1)
    if operation == "all_reduce":
        return 2 * ceil(log2(max(1, ranks / nodes))), 2 * ceil(log2(nodes))
    return ranks - nodes, nodes - 1


def _seconds_of_bytes(sent: Transfer, nodes: int, cluster: Cluster) -> float:
    inside = cluster["link.node.bandwidth"] * cluster["link.node.efficiency"]
    if nodes == 1:
        return sent.bytes / inside
    beyond = cluster["link.cluster.bandwidth"] * cluster["link.cluster.efficiency"]
    if sent.operation == "send":
        return sent.bytes / beyond
    beyond /= 1 + (cluster.get("link.cluster.crowding") or 0.0) * log2(nodes)
    if sent.operation == "all_to_all":  # to each peer its own part: those beyond the node by this rank's own link
        outside = (sent.ranks - sent.each_node) / (sent.ranks - 1)
        return sent.bytes * max(outside / beyond, (1 - outside) / inside)
    return sent.bytes / min(inside, beyond * sent.each_node)
