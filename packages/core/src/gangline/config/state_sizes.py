"""What an optimizer's configuration says of its state, for who plans memory and transfers. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod


class StateSizes(ABC):
    """Of an optimizer that keeps some numbers of each weight, wherever that is; others say more."""

    @abstractmethod
    def count_states(self, matrix: bool) -> float:
        """About how many numbers of a master's size are kept of each weight, for who compares layouts in a hurry.

        matrix: of a block's matrices, else of all others.
        """

    def state_bytes(self, shape: Sequence[int], part: Sequence[int], *, matrix: bool, master: int) -> int:
        """Bytes kept of a parameter of `shape` by a rank that has a box of shape `part` of it.

        matrix: as of `count_states`; master: bytes of a master weight.
        """
        return int(self.count_states(matrix)) * prod(part) * master

    def count_matrix_bytes(self, shape: Sequence[int], *, master: int) -> int:
        """Bytes kept beside it by the one rank that maps a matrix of a block (`Runtime.find_matrix_owners`)."""
        return 0

    def count_row_block(self, shape: Sequence[int]) -> int:
        """Neighbours of a row of a parameter, counted from its first, that no cut along rows may part; 1: any may."""
        return 1

    def maps_matrices(self) -> bool:
        """Whether a step gathers the matrices of the blocks and hands out what comes of them (`map_matrices`)."""
        return False
