"""Ulysses (Jacobs et al., arXiv 2309.14509): exchange a part of the sequence for a part of the heads, and back.

An all-to-all before attention gives each rank all tokens of some heads, so the module's attention function can compute
them; another all-to-all after attention gives each rank all heads of its tokens. Each rank has consecutive tokens. The
number of ranks must divide the number of query heads. If it does not divide the number of key heads, each key head is
repeated, and the gradients of its copies are summed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from gangline.comm.base import Comm
from gangline_basics.model.last_value_cache import LastValueCache
from gangline_basics.parallel.autograd import all_to_all

Attention = Callable[..., Tensor]


@dataclass(frozen=True)
class UlyssesAttention:
    """Ulysses for the `attention` seam over the ranks of `comm`, around the attention function `inner`.

    cache: cache of gathered positions and documents, shared by all layers
    """

    comm: Comm
    inner: Attention
    cache: LastValueCache = field(default_factory=LastValueCache, repr=False)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, document: Tensor | None, position: Tensor, *per_head: Tensor
    ) -> Tensor:
        """Return the attention output (B, H, t, C) of this rank's tokens.

        q (B, H, t, C), k and v (B, K, t, C), document (B, t) or None, position (B, t): of this rank's tokens
        per_head: tensors with one value for each query head (sinks); a rank uses the values of its heads
        Raises ValueError if the number of ranks does not divide H.
        """
        if q.shape[1] % self.comm.size:
            raise ValueError(f"{q.shape[1]} query heads do not divide over the {self.comm.size} ranks along cp")
        copies = self.comm.size // gcd(self.comm.size, k.shape[1])
        if copies > 1:
            k, v = (x.repeat_interleave(copies, dim=1) for x in (k, v))
        sequences = self.cache(document is None, position, lambda: _gather_positions(position, document, self.comm))
        own_parts = [x.chunk(self.comm.size)[self.comm.index] for x in per_head]
        q, k, v = _gather_tokens((q, k, v), self.comm)
        return _gather_heads(self.inner(q, k, v, sequences.document, sequences.position, *own_parts), self.comm)


def _gather_tokens(parts: tuple[Tensor, ...], comm: Comm) -> list[Tensor]:
    """Exchange each tensor (B, n·h, t, C) for (B, h, n·t, C), all tensors in one all-to-all."""
    n = comm.size
    flat = torch.cat([x.unflatten(1, (n, -1)).transpose(0, 1).flatten(1) for x in parts], dim=1)
    came = all_to_all(flat, comm).split([x.numel() // n for x in parts], dim=1)
    shapes = ((n, x.shape[0], x.shape[1] // n, *x.shape[2:]) for x in parts)
    return [x.view(shape).permute(1, 2, 0, 3, 4).flatten(2, 3) for x, shape in zip(came, shapes, strict=True)]


def _gather_heads(x_BhTC: Tensor, comm: Comm) -> Tensor:
    """Exchange (B, h, n·t, C) for (B, n·h, t, C), in memory order (B, t, n·h, C) like outputs of attention kernels."""
    rows = x_BhTC.unflatten(2, (comm.size, -1)).permute(2, 0, 3, 1, 4).contiguous()  # (n, B, t, h, C)
    return all_to_all(rows, comm).permute(1, 2, 0, 3, 4).flatten(2, 3).transpose(1, 2)


class _Whole(NamedTuple):
    """Positions and documents of full sequences, (B, T)."""

    position: Tensor
    document: Tensor | None


def _gather_positions(position_Bt: Tensor, document_Bt: Tensor | None, comm: Comm) -> _Whole:
    """Gather positions and documents of full sequences from all ranks; called once for all layers."""
    both = torch.stack([x for x in (position_Bt, document_Bt) if x is not None], dim=1)
    all_nBct = comm.all_gather(both[None].contiguous())
    position, *document = all_nBct.permute(2, 1, 0, 3).flatten(2)
    return _Whole(position, document[0] if document else None)
