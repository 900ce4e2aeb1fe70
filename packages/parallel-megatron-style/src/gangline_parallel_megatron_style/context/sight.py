"""What the queries of one rank see of the keys of each, chunks lying zig-zag.

Of 2n chunks rank i holds number i ("front") and number 2n - 1 - i ("back"). Causally, of the keys of rank j

    j = i    queries see what comes before them: the plain causal mask, for the chunks lie in order
    j < i    all queries see the front of j, none its back
    j > i    the back of i sees all of j, its front nothing

so with every rank but itself a rank multiplies half of the queries with the keys, whatever i and j.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gangline.comm import Comm


@dataclass(frozen=True)
class Block:
    """Queries from `first` on and keys up to `end` of one rank's keys, all of which are seen if `causal` is off."""

    first: int
    end: int
    causal: bool


def block_of(index: int, source: int, tokens: int) -> Block:
    """What rank `index` computes with the keys of rank `source`, each holding `tokens`."""
    if source == index:
        return Block(0, tokens, True)
    return Block(0, tokens // 2, False) if source < index else Block(tokens // 2, tokens, False)


class Documents:
    """The documents of all ranks, gathered once for all layers, and what they hide.

    With one look by the host it is known of each rank whether its keys are all seen, or none, or some; only for some a
    mask is made, and with none nothing is computed.
    """

    def __init__(self, document_BT: Tensor, comm: Comm) -> None:
        B, T = document_BT.shape
        self.index = comm.index
        self.all_nBT: Tensor = comm.all_gather(document_BT.contiguous()).view(comm.size, B, T)  # type: ignore[union-attr]
        seen = []
        for source in range(comm.size):
            block = block_of(comm.index, source, T)
            q, k = self._of(source, block)
            low, high = torch.maximum(q.amin(1), k.amin(1)), torch.minimum(q.amax(1), k.amax(1))
            one = (torch.maximum(q.amax(1), k.amax(1)) == torch.minimum(q.amin(1), k.amin(1))).all()
            seen.append(torch.stack(((low <= high).any(), one)))
        self._seen: list[list[bool]] = torch.stack(seen).tolist()

    def _of(self, source: int, block: Block) -> tuple[Tensor, Tensor]:
        return self.all_nBT[self.index][:, block.first :], self.all_nBT[source][:, : block.end]

    def hides_all(self, source: int) -> bool:
        """Whether no query has a key of its document on rank `source`."""
        return not self._seen[source][0]

    def visible(self, source: int, block: Block) -> Tensor | None:
        """(B, 1, T, S), causality included; None where documents hide nothing."""
        if self._seen[source][1]:
            return None
        q_BT, k_BS = self._of(source, block)
        same = q_BT[:, None, :, None] == k_BS[:, None, None, :]
        return same.tril() if block.causal else same
