"""Linear RoPE scaling by position interpolation (Chen et al., arXiv 2306.15595, 3.2). Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gangline.config import PositiveFloat
from gangline_basics.model.rope_rates import RopeScaling, compute_plain_rates
from gangline_models.rope.base import RopeChoice


@dataclass(frozen=True)
class LinearScaling(RopeScaling):
    """Linear scaling: position m is rotated as m / factor."""

    factor: float

    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        return tuple(rate / self.factor for rate in compute_plain_rates(theta, width))


@dataclass
class LinearRope(RopeChoice):
    """Options of linear RoPE scaling: all wavelengths grow by one factor."""

    kind: ClassVar[str] = "linear"
    words: ClassVar[Mapping[str, str]] = {"factor": "factor"}
    needed: ClassVar[tuple[str, ...]] = ("factor",)

    factor: PositiveFloat = 8.0  # scaling factor of all RoPE wavelengths

    def make_scaling(self, length: int) -> RopeScaling:
        return LinearScaling(self.factor)
