"""All-to-all of rows to the ranks of their experts and back: interface and flat implementation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gangline.comm.base import Comm, Pending


class AllToAll(ABC):
    """All-to-all of one microbatch over the expert-parallel ranks, and its reverse; rows (A, ...) sorted by expert."""

    @abstractmethod
    def to_experts(self, rows: Tensor) -> Pending[Tensor]:
        """Start the all-to-all of rows (A, ...) to the ranks of their experts.

        Its result is (a, ...), the rows of this rank's experts.
        """

    @abstractmethod
    def from_experts(self, rows: Tensor) -> Pending[Tensor]:
        """Start the reverse all-to-all of rows (a, ...) of this rank's experts.

        Its result is (A, ...), in the order of the rows given to `to_experts`.
        """


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
