"""What the cost of a module depends on besides its node, and what it sends. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LocalSizes:
    """Sizes of one microbatch on one rank: what the cost of a module depends on besides its node.

    tokens           of the hidden state that a block is given on this rank
    inner_tokens     the same between products that tp cuts, where a rank may see more of them (sequence parallelism)
    itemsize         bytes of a number in an activation
    master_itemsize  bytes of a number that is computed in the dtype of the masters (`Plan.master_dtype`)
    ranks            how many ranks an axis or a fold has, by its name; see `size`
    """

    tokens: int
    inner_tokens: int
    itemsize: int
    master_itemsize: int
    ranks: Mapping[str, int]

    def size(self, axis: str) -> int:
        """Ranks of a mesh axis, or of a fold: 1 where the mesh has none for it."""
        return self.ranks.get(axis, 1)


@dataclass(frozen=True, kw_only=True)
class CommVolume:
    """Communication volume of a module over the fold that it is bound to: bytes that leave a rank for one microbatch.

    fold      the name of the fold
    what      in a few words, for a table of a run's traffic; what is assumed of the data belongs here, too
    forward   (calls, bytes) of its forward pass
    backward  (calls, bytes) of its backward pass
    among     so many neighbours of the fold, beyond whom nothing of it goes; None: all of it
    """

    fold: str
    what: str
    forward: tuple[int, int]
    backward: tuple[int, int]
    among: int | None = None
