"""All-to-all with one message per expert, received at the final place of its rows.

The sender has its rows sorted by rank and then by expert, the receiver needs them by expert and then by rank: one batch
of transfers between slices of the two buffers regroups them, without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline_moe.dispatch.all_to_all import AllToAll

Counts = list[list[int]]  # rows by rank, and by expert of that rank


@dataclass(frozen=True)
class PerExpertAllToAll(AllToAll):
    """Per-expert all-to-all. sent: rows for each rank's experts; received: rows from each rank for the experts here."""

    comm: Comm
    sent: Counts
    received: Counts

    @property
    def bounds(self) -> Tensor:
        """Bounds of each expert's rows, (experts here + 1,): the rows of expert e are bounds[e] to bounds[e + 1]."""
        per_expert = [sum(column) for column in zip(*self.received, strict=True)]
        return torch.tensor([0, *per_expert]).cumsum(0)

    def to_experts(self, rows: Tensor) -> Pending[Tensor]:
        return self._send(rows, list(_iterate_by_rank(self.sent)), list(_iterate_by_expert(self.received)))

    def from_experts(self, rows: Tensor) -> Pending[Tensor]:
        return self._send(rows, list(_iterate_by_expert(self.received)), list(_iterate_by_rank(self.sent)))

    def _send(
        self, rows: Tensor, sources: list[tuple[int, int, int]], targets: list[tuple[int, int, int]]
    ) -> Pending[Tensor]:
        """Start the exchange. sources, targets: (peer, start, stop), for each peer in the order of the experts."""
        out = rows.new_empty(max((stop for _, _, stop in targets), default=0), *rows.shape[1:])
        sends = [(rows[start:stop], peer) for peer, start, stop in sources if stop > start]
        recvs = [(out[start:stop], peer) for peer, start, stop in targets if stop > start]
        return _Arriving(self.comm.start_exchange(sends, recvs), out, rows)


@dataclass
class _Arriving:
    """Receive buffer of an exchange in flight; sent rows are kept until they have been sent."""

    pending: Pending[Sequence[Tensor]]
    out: Tensor
    rows: Tensor

    def wait(self) -> Tensor:
        self.pending.wait()
        return self.out


def _iterate_by_rank(counts: Counts) -> Iterator[tuple[int, int, int]]:
    start = 0
    for peer, of_experts in enumerate(counts):
        for count in of_experts:
            yield peer, start, start + count
            start += count


def _iterate_by_expert(counts: Counts) -> Iterator[tuple[int, int, int]]:
    start = 0
    for expert in range(len(counts[0])):
        for peer, of_experts in enumerate(counts):
            yield peer, start, start + of_experts[expert]
            start += of_experts[expert]
