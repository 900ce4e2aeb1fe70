"""8-bit moments: blockwise dynamic quantisation (Dettmers et al., arXiv 2110.02861, sections 2.1 and 2.2).

    x ≈ level[c] · s       c (R, F) uint8, s (R, S) float32, S = ceil(F / block)

Each `block` adjacent elements of a row share a scale s, their largest |x|; the last block of a row may be shorter. The
256 levels are in [-1, 1], fine near 0 and coarse near 1: each of seven decades has twice as many levels as the decade
below. A block is part of one row, so codes and scales depend on the row alone as long as no shard splits a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

DECADES = 7
MANTISSA = 9  # mantissa bits of a cell: enough that a cell contains at most one midpoint
SHIFT = 23 - MANTISSA
# first cell, from 2^-24 on (below every midpoint), and last cell, from 1 on
LEAST, MOST = (127 - 24) << MANTISSA, 127 << MANTISSA


@dataclass(frozen=True)
class Levels:
    """The 256 levels of a code, and tables to find the level nearest to a number.

    values   levels in ascending order; the positive levels follow index `zero`
    between  between[i]: midpoint of the i-th nonnegative level and the next level
    cells    number of midpoints below each cell; a cell is the range of float32 numbers with the same leading bits
    """

    values: Tensor
    zero: int
    between: Tensor
    cells: Tensor

    def find_nearest(self, x: Tensor) -> Tensor:
        """Find the index of the nearest level, int32; x: float32 in [-1, 1]. A table is 5 times as fast as a search."""
        size = x.abs().view(-1)
        cell = (size.view(torch.int32) >> SHIFT).clamp_(LEAST, MOST).sub_(LEAST)
        indices = self.cells.index_select(0, cell)
        indices += size > self.between.index_select(0, indices)
        if self.zero:  # signed levels: -1 is not a level
            indices = torch.where(x.view(-1) < 0, -indices.clamp(max=self.zero), indices).add_(self.zero)
        return indices.view(x.shape)


@lru_cache(maxsize=16)
def make_levels(signed: bool, device: torch.device) -> Levels:
    """Return the levels 0 and 1, and 2^i levels per sign, or 2^(i+1) unsigned, in decade i: from 10^(i-7) to 10^(i-6).

    The levels of a decade are the midpoints of intervals of equal length.
    """
    above = [1.0]
    for decade in range(DECADES):
        parts = 2**decade if signed else 2 ** (decade + 1)
        above += [10.0 ** (decade - DECADES + 1) * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    below = [-level for level in above if level < 1 and signed]
    values = torch.tensor(sorted([*below, 0.0, *above]), dtype=torch.float64)
    zero = len(below)
    between = (values[zero + 1 :] + values[zero:-1]) / 2
    starts = (torch.arange(LEAST, MOST + 1, dtype=torch.int32) << SHIFT).view(torch.float32).double()
    cells = torch.bucketize(starts, between, out_int32=True)
    between = torch.cat([between, torch.full((1,), torch.inf, dtype=torch.float64)])
    return Levels(values.to(device), zero, between.to(device, torch.float32), cells.to(device))


def encode(x_RF: Tensor, block: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Return (codes (R, F) uint8, scales (R, S) float32) of rows, each element by its nearest level in float32.

    An unsigned value (a second moment) gets at least the smallest level instead of 0, because the update divides by
    its root.
    """
    rows, width = x_RF.shape
    x_RSB = pad(x_RF, (0, -width % block)).view(rows, -1, block)
    scales_RS = x_RSB.abs().amax(-1).float()
    tiny = torch.finfo(torch.float32).tiny  # the scale of a block of zeros is 0
    codes = make_levels(signed, x_RF.device).find_nearest(
        (x_RSB / scales_RS.to(x_RF.dtype).clamp(min=tiny)[..., None]).float()
    )
    if not signed:
        codes = codes.clamp_(min=1)
    return codes.to(torch.uint8).view(rows, -1)[:, :width], scales_RS


def decode(codes_RF: Tensor, scales_RS: Tensor, block: int, signed: bool, dtype: torch.dtype) -> Tensor:
    """Return the values (R, F) that codes and scales encode."""
    rows, width = codes_RF.shape
    values = make_levels(signed, codes_RF.device).values.to(dtype)
    x = values.index_select(0, pad(codes_RF, (0, -width % block)).view(-1).int())
    return x.view(rows, -1, block).mul_(scales_RS.to(dtype)[..., None]).view(rows, -1)[:, :width]
