"""All-to-all with one message per expert, received at the final offset of its rows.

The sender's rows are sorted by rank and then by expert; the receiver needs them sorted by expert and then by rank. One
batch of transfers between slices of the two buffers regroups the rows, without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm.base import Comm, Pending
from gangline_moe.dispatch.all_to_all import AllToAll

Counts = list[list[int]]  # number of rows, by rank and then by expert


@dataclass(frozen=True)
class PerExpertAllToAll(AllToAll):
    """Per-expert all-to-all. sent: row counts for each rank's experts; received: row counts from each rank."""

    comm: Comm
    sent: Counts
    received: Counts

    @property
    def bounds(self) -> Tensor:
        """Bounds of each expert's rows, (experts on this rank + 1,): expert e has rows bounds[e] to bounds[e + 1]."""
        per_expert = [sum(column) for column in zip(*self.received, strict=True)]
        return torch.tensor([0, *per_expert]).cumsum(0)

    def to_experts(self, rows: Tensor) -> Pending[Tensor]:
        return self._send(rows, list(_iterate_by_rank(self.sent)), list(_iterate_by_expert(self.received)))

    def from_experts(self, rows: Tensor) -> Pending[Tensor]:
        return self._send(rows, list(_iterate_by_expert(self.received)), list(_iterate_by_rank(self.sent)))

    def _send(
        self, rows: Tensor, sources: list[tuple[int, int, int]], targets: list[tuple[int, int, int]]
    ) -> Pending[Tensor]:
        """Start the exchange. sources, targets: (peer, start, stop) of each slice of rows; per peer in expert order."""
        out = rows.new_empty(max((stop for _, _, stop in targets), default=0), *rows.shape[1:])
        sends = [(rows[start:stop], peer) for peer, start, stop in sources if stop > start]
        recvs = [(out[start:stop], peer) for peer, start, stop in targets if stop > start]
        return _Arriving(self.comm.start_exchange(sends, recvs), out, rows)


@dataclass
class _Arriving:
    """Receive buffer of an exchange in flight; `rows`, the send buffer, is kept until it has been sent."""

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
