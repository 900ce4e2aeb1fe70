"""Seconds of a collective: bytes over the slowest links that it crosses, and a latency for each message in a row.

Ranks of one node that take part together share that node's links to others, so a ring over k ranks of each node moves
as fast as k links (the rails of a fat tree). Ranks of a rack share its links to others if the cluster file has numbers
for links inside a rack (`link.rack`), and ranks of a datacentre its fibre. Rings and trees: Thakur, Rabenseifner and
Gropp, IJHPCA 19, 2005. The more nodes a collective has, the more switches its messages cross and share with others:
each doubling of the nodes adds `link.cluster.crowding` of its bytes' time.
"""

from __future__ import annotations

from itertools import pairwise
from math import ceil, log2
from typing import NamedTuple

from gangline.explain.explained import Operation, Transfer
from gangline_basics.cluster.file import Cluster

TIERS = ("node", "rack", "cluster", "fibre")


class Crossed(NamedTuple):
    """Links of one tier that a collective crosses.

    parts, left  number of parts into which its ranks fall without these links, and with them
    each         number of ranks in such a part, which use its links together
    """

    tier: str
    parts: int
    left: int
    each: int


def compute_transfer_seconds(sent: Transfer, cluster: Cluster) -> float:
    """Return the seconds of all calls of a step, one after the other, without other load."""
    if sent.ranks < 2 or not sent.calls:
        return 0.0
    links = find_crossed_links(sent, cluster)
    if sent.operation == "send":  # to one rank, over the slowest of the links
        tier = links[-1].tier
        return sent.calls * cluster[f"link.{tier}.latency"] + sent.bytes / compute_link_speed(tier, cluster)
    latency = sum(
        count_messages(sent.operation, link.parts, link.left)[0] * cluster[f"link.{link.tier}.latency"]
        for link in links
    )
    return sent.calls * latency + _compute_byte_seconds(sent, links, cluster)


def find_crossed_links(sent: Transfer, cluster: Cluster) -> list[Crossed]:
    """Return the links that a transfer crosses, from inside a node up to those that connect all ranks.

    If the cluster file has no numbers for links inside a rack, the cluster's links are used.
    """
    if sent.tier == "node":
        return [Crossed("node", sent.ranks, 1, 1)]
    known = cluster.get("link.rack.bandwidth") is not None
    last = sent.tier if known or sent.tier != "rack" else "cluster"
    rack = sent.each_rack or sent.each_node if known else sent.each_node
    near = {"node": 1, "rack": sent.each_node, "cluster": rack, "fibre": sent.each_datacentre or rack}
    tiers = [tier for tier in TIERS[: TIERS.index(last) + 1] if known or tier != "rack"]
    part_counts = [*(max(2, ceil(sent.ranks / near[tier])) for tier in tiers[1:]), 1]
    links = map(Crossed, tiers, [sent.ranks, *part_counts[:-1]], part_counts, (near[tier] for tier in tiers))
    return [link for link in links if link.tier == "node" or link.left < link.parts]


def compute_link_speed(tier: str, cluster: Cluster) -> float:
    """Return the bytes per second that a rank sends over links of a tier."""
    return cluster[f"link.{tier}.bandwidth"] * cluster[f"link.{tier}.efficiency"]


def count_messages(operation: Operation, ranks: int, nodes: int = 1) -> tuple[int, int]:
    """Return (messages inside nodes, messages between nodes) of a call, counting messages that wait for each other.

    All-gather and reduce-scatter go round a ring, from rank to rank; all-reduce goes up a tree and down; all-to-all
    goes to all ranks at once.
    """
    if operation == "send":
        return (1, 0) if nodes == 1 else (0, 1)
    if operation == "all_to_all":
        return (1, 0) if nodes == 1 else (1, 1)
    if operation == "all_reduce":
        return 2 * ceil(log2(max(1, ranks / nodes))), 2 * ceil(log2(nodes))
    return ranks - nodes, nodes - 1


def _compute_byte_seconds(sent: Transfer, links: list[Crossed], cluster: Cluster) -> float:
    speeds = [compute_link_speed(link.tier, cluster) for link in links]
    crowding = cluster.get("link.cluster.crowding") or 0.0
    for place, link in enumerate(links):
        if link.tier == "cluster":
            speeds[place] /= 1 + crowding * log2(link.parts / link.left)
    if sent.operation == "all_to_all":  # to each peer its own part, over this rank's own links
        near = [*(link.each for link in links), sent.ranks]
        peers = [(behind - before) / (sent.ranks - 1) for before, behind in pairwise(near)]
        return sent.bytes * max(share / fast for share, fast in zip(peers, speeds, strict=True))
    return sent.bytes / min(fast * link.each for fast, link in zip(speeds, links, strict=True))
