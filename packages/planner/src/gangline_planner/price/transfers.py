"""Seconds of a collective: bytes over the slowest links that it crosses, plus a latency per consecutive message.

Ranks of a node in the same collective share the node's links to other nodes, so a ring over k ranks of each node is as
fast as k links (the rails of a fat tree). In the same way, ranks of a rack share the rack's links if the cluster file
has numbers for links inside a rack (`link.rack`), and ranks of a datacentre share its fibre. Rings and trees: Thakur,
Rabenseifner and Gropp, IJHPCA 19, 2005. Congestion: the more nodes a collective has, the more switches its messages
cross and share with other traffic. Each doubling of the nodes adds the share `link.cluster.crowding` to the time of the
bytes.
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

    parts  number of groups of ranks that these links connect, such as nodes
    left   number of groups that remain when these links have connected them, such as racks
    each   number of ranks in one of the `parts` groups, which share its links
    """

    tier: str
    parts: int
    left: int
    each: int


def compute_transfer_seconds(sent: Transfer, cluster: Cluster) -> float:
    """Return the seconds of all calls of a transfer in a step, one after the other, without other load."""
    if sent.ranks < 2 or not sent.calls:
        return 0.0
    links = find_crossed_links(sent, cluster)
    if sent.operation == "send":  # a send goes to one rank, over the slowest tier of links
        tier = links[-1].tier
        return sent.calls * cluster[f"link.{tier}.latency"] + sent.bytes / compute_link_speed(tier, cluster)
    latency = sum(
        count_messages(sent.operation, link.parts, link.left)[0] * cluster[f"link.{link.tier}.latency"]
        for link in links
    )
    return sent.calls * latency + _compute_byte_seconds(sent, links, cluster)


def find_crossed_links(sent: Transfer, cluster: Cluster) -> list[Crossed]:
    """Return the links that a transfer crosses, from links inside a node up to the tier that connects all its ranks.

    If the cluster file has no numbers for links inside a rack, the links of the cluster are used.
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
    """Return the bytes per second that a rank sends over the links of a tier."""
    return cluster[f"link.{tier}.bandwidth"] * cluster[f"link.{tier}.efficiency"]


def count_messages(operation: Operation, ranks: int, nodes: int = 1) -> tuple[int, int]:
    """Return the numbers of consecutive messages of a call: (messages inside nodes, messages between nodes).

    All-gather and reduce-scatter use a ring; all-reduce goes up a tree and down; all-to-all sends to all ranks at once.
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
    if sent.operation == "all_to_all":  # each peer gets its own part, over the links of this rank alone
        near = [*(link.each for link in links), sent.ranks]
        peers = [(behind - before) / (sent.ranks - 1) for before, behind in pairwise(near)]
        return sent.bytes * max(share / fast for share, fast in zip(peers, speeds, strict=True))
    return sent.bytes / min(fast * link.each for fast, link in zip(speeds, links, strict=True))
