"""Moments in 8 bits: blockwise dynamic quantisation (Dettmers et al., arXiv 2110.02861, sections 2.1 and 2.2).

    x ≈ level[c] · s       c (R, F) uint8, s (R, S) float32, S = ceil(F / block)

Each `block` neighbours of a row share a scale s, the largest |x| among them; the last block of a row may be shorter. A
level is one of 256 in [-1, 1], fine near 0 and coarse near 1: each of seven powers of ten has twice as many as the one
below it. A block lies in one row, so codes and scales are functions of the row alone as long as no cut parts a block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn.functional import pad

DECADES = 7
MANTISSA = 9  # bits of it that a number is looked up by: cells so small that no two midpoints are in one
SHIFT = 23 - MANTISSA
LEAST, MOST = (127 - 24) << MANTISSA, 127 << MANTISSA  # of 2^-24, below every midpoint, and of 1


@dataclass(frozen=True)
class Levels:
    """values: the 256 levels in order, the positive ones behind `zero`; between[i]: where level i of these ends.

    cells: for float32 numbers by the first bits of theirs, from 2^-24 to 1, how many of the positive ones' midpoints
    are below all of the cell.
    """

    values: Tensor
    zero: int
    between: Tensor
    cells: Tensor

    def find_nearest(self, x: Tensor) -> Tensor:
        """The number of the nearest level, int32; x float32 in [-1, 1]. A table in place of a search: 5 x as fast."""
        size = x.abs().view(-1)
        cell = (size.view(torch.int32) >> SHIFT).clamp_(LEAST, MOST).sub_(LEAST)
        indices = self.cells.index_select(0, cell)
        indices += size > self.between.index_select(0, indices)
        if self.zero:  # there is one level less below 0 than above
            indices = torch.where(x.view(-1) < 0, -indices.clamp(max=self.zero), indices).add_(self.zero)
        return indices.view(x.shape)


@lru_cache(maxsize=16)
def make_levels(signed: bool, device: torch.device) -> Levels:
    """Of decade i, numbers from 10^(i-7) to 10^(i-6), 2^i levels of either sign, or 2^(i+1) where all are positive.

    They are the middles of parts of equal length. Beside these 0 and 1.
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
    """(codes (R, F) uint8, scales (R, S) float32) of rows, each number by the nearest level, found in float32.

    What is never negative (a mean of squares) does not become 0, by which a mean would be divided: it has the
    smallest level at least.
    """
    rows, width = x_RF.shape
    x_RSB = pad(x_RF, (0, -width % block)).view(rows, -1, block)
    scales_RS = x_RSB.abs().amax(-1).float()
    tiny = torch.finfo(torch.float32).tiny  # a block of zeros has the scale 0
    codes = make_levels(signed, x_RF.device).find_nearest(
        (x_RSB / scales_RS.to(x_RF.dtype).clamp(min=tiny)[..., None]).float()
    )
    if not signed:
        codes = codes.clamp_(min=1)
    return codes.to(torch.uint8).view(rows, -1)[:, :width], scales_RS


def decode(codes_RF: Tensor, scales_RS: Tensor, block: int, signed: bool, dtype: torch.dtype) -> Tensor:
    """(R, F): what codes and scales stand for."""
    rows, width = codes_RF.shape
    values = make_levels(signed, codes_RF.device).values.to(dtype)
    x = values.index_select(0, pad(codes_RF, (0, -width % block)).view(-1).int())
    return x.view(rows, -1, block).mul_(scales_RS.to(dtype)[..., None]).view(rows, -1)[:, :width]
