"""An all-to-all in two steps for folds wider than a node: inside nodes first, then between ranks of the same number.

Rank i of node a has rows for rank j of node b. It hands them to rank j of its own node, over the node's fast links;
that rank sends what all of node a has for (b, j) in one message. A rank then sends to one rank of each other node
instead of to all of them: fewer and larger messages between nodes, and the same bytes (Tutel, arXiv 2206.03382, "two-
dimensional hierarchical all-to-all"). What arrives lies in the order of the source ranks, as it does without.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm import Comm, Pending


def by_node(comm: Comm, to: list[int], ranks_per_node: int, device: torch.device) -> tuple[ByNode, ByNode]:
    """The transfer and its reverse; `to`: this rank's rows for each rank. One small all-gather."""
    everyone = comm.all_gather(torch.tensor([to], device=device))
    forth = everyone.tolist()
    back = everyone.t().tolist()
    return ByNode(comm, ranks_per_node, forth), ByNode(comm, ranks_per_node, back)


@dataclass(frozen=True)
class ByNode:
    """rows_RR[r][s]: how many rows rank r has for rank s."""

    comm: Comm
    ranks_per_node: int
    rows_RR: list[list[int]]

    def begin(self, rows: Tensor) -> Pending[Tensor]:
        """Start the step inside the node."""
        each, nodes, index = self.ranks_per_node, self.comm.size // self.ranks_per_node, self.comm.index
        first = index - index % each
        mates = range(first, first + each)
        parts = rows.split(self.rows_RR[index])
        outgoing = {mate: torch.cat(parts[mate - first :: each]) for mate in mates}
        incoming = {
            mate: rows.new_empty(sum(self.rows_RR[mate][index % each :: each]), *rows.shape[1:]) for mate in mates
        }
        incoming[index] = outgoing[index]
        others = [mate for mate in mates if mate != index]
        pending = self.comm.start_exchange(
            [(outgoing[mate], mate) for mate in others], [(incoming[mate], mate) for mate in others]
        )
        return _Inside(self, pending, outgoing, incoming, nodes)


@dataclass
class _Inside:
    """The first step under way; waiting for it does the second. `outgoing` is kept until it has left."""

    plan: ByNode
    pending: Pending[Sequence[Tensor]]
    outgoing: dict[int, Tensor]
    incoming: dict[int, Tensor]
    nodes: int

    def wait(self) -> Tensor:
        self.pending.wait()
        comm, each, rows_RR = self.plan.comm, self.plan.ranks_per_node, self.plan.rows_RR
        number = comm.index % each
        peers = [node * each + number for node in range(self.nodes)]
        by_mate = [rows.split([rows_RR[mate][peer] for peer in peers]) for mate, rows in self.incoming.items()]
        outgoing = [torch.cat([parts[node] for parts in by_mate]) for node in range(self.nodes)]
        example = outgoing[0]
        incoming = []
        for node in range(self.nodes):
            count = sum(rows_RR[source][comm.index] for source in range(node * each, (node + 1) * each))
            incoming.append(example.new_empty(count, *example.shape[1:]))
        own = comm.index // each
        incoming[own] = outgoing[own]
        others = [node for node in range(self.nodes) if node != own]
        comm.exchange(
            [(outgoing[node], peers[node]) for node in others], [(incoming[node], peers[node]) for node in others]
        )
        return torch.cat(incoming)
