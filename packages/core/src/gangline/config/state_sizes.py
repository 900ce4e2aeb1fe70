"""Bytes of an optimizer's state, computed from its options to plan memory and transfers. Torch-free."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod


class StateSizes(ABC):
    """Sizes of an optimizer's state; the defaults suit an optimizer that stores a fixed number of values per weight."""

    @abstractmethod
    def count_states(self, matrix: bool) -> float:
        """Return the approximate number of state values per weight, each of a master weight's size, to compare layouts.

        matrix: whether the weight belongs to a matrix of a block.
        """

    def state_bytes(self, shape: Sequence[int], part: Sequence[int], *, matrix: bool, master: int) -> int:
        """Return the bytes of state on a rank that has a shard of shape `part` of a parameter of shape `shape`.

        matrix: as in `count_states`; master: bytes of a master weight.
        """
        return int(self.count_states(matrix)) * prod(part) * master

    def count_matrix_bytes(self, shape: Sequence[int], *, master: int) -> int:
        """Return the extra bytes of state on the rank that updates a block's matrix (`Runtime.find_matrix_owners`)."""
        return 0

    def count_row_block(self, shape: Sequence[int]) -> int:
        """Return the size of the blocks of the last dim, from index 0, that no shard may split; 1: no constraint."""
        return 1

    def maps_matrices(self) -> bool:
        """Return whether a step gathers the matrices of blocks and shards the results (`Runtime.map_matrices`)."""
        return False
