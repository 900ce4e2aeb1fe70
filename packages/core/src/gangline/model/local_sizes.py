"""Sizes per rank, from which a node computes the cost of its module, and the communication volume. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalSizes:
    """Sizes of one microbatch on one rank, from which a node computes the cost of its module.

    tokens           number of tokens of the hidden state at the input of a block on this rank
    inner_tokens     number of tokens between tp-sharded matmuls: more than `tokens` under sequence parallelism
    itemsize         bytes per element of an activation
    master_itemsize  bytes per element of an activation that is computed in the master dtype (`Plan.master_dtype`)
    ranks            name of an axis or a fold -> number of ranks; see `size`
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
    """Communication volume of a module over the fold that it is bound to, in bytes sent per rank and microbatch.

    fold      name of the fold
    what      description for a table of traffic, with assumptions on the data
    forward   (calls, bytes) of the forward pass
    backward  (calls, bytes) of the backward pass
    among     number of neighbouring ranks in the fold that exchange the bytes; None: all ranks of the fold
    """

    fold: str
    what: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    among: int | None = None
