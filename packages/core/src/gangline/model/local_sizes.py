"""Sizes on one rank, from which a node computes the cost of its module, and the communication volume. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalSizes:
    """Sizes of one microbatch on one rank, from which a node computes the cost of its module.

    tokens           tokens of the hidden state at the input of a block on this rank
    inner_tokens     tokens between matmuls that tp shards: more than `tokens` under sequence parallelism
    itemsize         bytes of a number of an activation
    master_itemsize  bytes of a number that is computed in the dtype of the masters (`Plan.master_dtype`)
    ranks            number of ranks of an axis or a fold, by its name; see `size`
    """

    tokens: int
    inner_tokens: int
    itemsize: int
    master_itemsize: int
    ranks: Mapping[str, int]

    def size(self, axis: str) -> int:
        """Return the number of ranks of a mesh axis or a fold; 1 if the mesh lacks it."""
        return self.ranks.get(axis, 1)


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """Communication volume of a module over the fold that it is bound to: bytes that leave a rank for one microbatch.

    fold      the name of the fold
    what      a few words for a table of traffic, with assumptions on the data
    forward   (calls, bytes) of the forward pass
    backward  (calls, bytes) of the backward pass
    among     number of neighbours in the fold that exchange it with each other; None: the complete fold
    """

    fold: str
    what: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    among: int | None = None
