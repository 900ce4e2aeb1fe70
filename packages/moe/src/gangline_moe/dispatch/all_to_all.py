"""All-to-all of rows to the ranks of their experts and back: the contract of a transfer, and the flat version."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gangline.comm.base import Comm, Pending


class AllToAll(ABC):
    """Transfer of one microbatch over the ranks of a fold, and its reverse; rows are (A, ...), sorted by expert."""

    @abstractmethod
    def to_experts(self, rows: Tensor) -> Pending[Tensor]:
        """Start to send this rank's rows to their experts -> (a, ...), the rows of the experts on this rank."""

    @abstractmethod
    def from_experts(self, rows: Tensor) -> Pending[Tensor]:
        """Start to send rows back: (a, ...) -> (A, ...), in the order in which they were sent."""


@dataclass(frozen=True)
class FlatAllToAll(AllToAll):
    """Flat all-to-all: one message to each rank. Arrived rows are sorted by source rank.

    sent, received: number of rows to and from each rank.
    """

    comm: Comm
    sent: Sequence[int]
    received: Sequence[int]

    def to_experts(self, rows: Tensor) -> Pending[Tensor]:
        return self.comm.start_all_to_all(rows, self.sent, self.received)

    def from_experts(self, rows: Tensor) -> Pending[Tensor]:
        return self.comm.start_all_to_all(rows, self.received, self.sent)
