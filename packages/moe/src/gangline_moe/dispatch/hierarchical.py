"""Hierarchical all-to-all over several nodes: first inside each node, then between ranks with equal local rank.

Rank i of node a has rows for rank j of node b. It sends them to rank j of node a, over the node's fast links;
rank j of node a then sends all rows of node a for rank j of node b in one message. Each rank thus sends to one rank of
each other node instead of to all ranks of that node: fewer and larger messages between nodes, and equally many bytes
(Tutel, arXiv 2206.03382, "two-dimensional hierarchical all-to-all"). Arrived rows are sorted by source rank, as after
the flat all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline_moe.dispatch.all_to_all import AllToAll


@dataclass(frozen=True)
class HierarchicalAllToAll(AllToAll):
    """All-to-all in two steps, within a node and between nodes.

    rows_RR[r][s]: number of rows that rank r sends to rank s
    """

    comm: Comm
    ranks_per_node: int
    rows_RR: list[list[int]]

    @classmethod
    def from_sent(cls, comm: Comm, sent: list[int], ranks_per_node: int, device: torch.device) -> HierarchicalAllToAll:
        """Build the transfer from this rank's row counts per target rank, with one small all-gather."""
        return cls(comm, ranks_per_node, comm.all_gather(torch.tensor([sent], device=device)).tolist())

    def to_experts(self, rows: Tensor) -> Pending[Tensor]:
        return _start(rows, self.comm, self.ranks_per_node, self.rows_RR)

    def from_experts(self, rows: Tensor) -> Pending[Tensor]:
        back = [list(column) for column in zip(*self.rows_RR, strict=True)]
        return _start(rows, self.comm, self.ranks_per_node, back)


def _start(rows: Tensor, comm: Comm, ranks_per_node: int, rows_RR: list[list[int]]) -> _InsideNode:
    """Start the exchange inside the node; `wait` of the result also runs the exchange between nodes."""
    index = comm.index
    first = index - index % ranks_per_node
    mates = range(first, first + ranks_per_node)
    parts = rows.split(rows_RR[index])
    outgoing = {mate: torch.cat(parts[mate - first :: ranks_per_node]) for mate in mates}
    incoming = {
        mate: rows.new_empty(sum(rows_RR[mate][index % ranks_per_node :: ranks_per_node]), *rows.shape[1:])
        for mate in mates
    }
    incoming[index] = outgoing[index]
    others = [mate for mate in mates if mate != index]
    pending = comm.start_exchange(
        [(outgoing[mate], mate) for mate in others], [(incoming[mate], mate) for mate in others]
    )
    return _InsideNode(comm, ranks_per_node, rows_RR, pending, outgoing, incoming)


@dataclass
class _InsideNode:
    """Exchange inside the node, in flight; `wait` also runs the one between nodes. `outgoing` is kept until sent."""

    comm: Comm
    ranks_per_node: int
    rows_RR: list[list[int]]
    pending: Pending[Sequence[Tensor]]
    outgoing: dict[int, Tensor]
    incoming: dict[int, Tensor]

    def wait(self) -> Tensor:
        self.pending.wait()
        comm, each, rows_RR = self.comm, self.ranks_per_node, self.rows_RR
        nodes, number = comm.size // each, comm.index % each
        peers = [node * each + number for node in range(nodes)]
        by_mate = [rows.split([rows_RR[mate][peer] for peer in peers]) for mate, rows in self.incoming.items()]
        outgoing = [torch.cat([parts[node] for parts in by_mate]) for node in range(nodes)]
        example = outgoing[0]
        incoming = []
        for node in range(nodes):
            count = sum(rows_RR[source][comm.index] for source in range(node * each, (node + 1) * each))
            incoming.append(example.new_empty(count, *example.shape[1:]))
        own = comm.index // each
        incoming[own] = outgoing[own]
        others = [node for node in range(nodes) if node != own]
        comm.exchange(
            [(outgoing[node], peers[node]) for node in others], [(incoming[node], peers[node]) for node in others]
        )
        return torch.cat(incoming)
