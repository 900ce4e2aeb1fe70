"""Precisions with one fault each."""

from __future__ import annotations

import torch

from gangline_basics.precision.fp16 import ScaledFp16
from gangline_basics.precision.plain import Plain


class Whole(Plain):
    def __init__(self, config, run):
        super().__init__(torch.float32, torch.float32)


class NoBias(Whole):
    def linear(self, x, w, b=None):
        return super().linear(x, w)


class CrookedGradient(Whole):
    """Computes the gradient of the weight from the first half of the tokens only."""

    def linear(self, x, w, b=None):
        rows = x.reshape(-1, x.shape[-1])
        half = len(rows) // 2
        y = torch.cat((super().linear(rows[:half], w, b), super().linear(rows[half:], w.detach(), b)))
        return y.view(*x.shape[:-1], -1)


class Scribbles(Whole):
    def linear(self, x, w, b=None):
        x.data.clamp_(-1, 1)
        return super().linear(x, w, b)


class LowMasters(Plain):
    def __init__(self, config, run):
        super().__init__(torch.bfloat16, torch.bfloat16)


class Coarse(Whole):
    """Claims to compute in float32, but rounds the inputs of matmuls to bfloat16."""

    def linear(self, x, w, b=None):
        return super().linear(x.bfloat16().float(), w.bfloat16().float(), b)


class Scaled(ScaledFp16):
    def __init__(self, config, run):
        super().__init__(config)


class ScaleForgets(Scaled):
    def state(self):
        return {}

    def load_state(self, state):
        pass


class ScaleGrows(Scaled):
    def update(self, found_inf):
        super().update(False)


class ScaleIgnored(Scaled):
    """Never changes its loss scale."""

    def update(self, found_inf):
        pass
