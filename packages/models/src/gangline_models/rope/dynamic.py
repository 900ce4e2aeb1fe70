"""Dynamic NTK-aware RoPE scaling: the base grows with the row length, so long wavelengths grow most. Torch-free.

Peng et al. (YaRN, arXiv 2309.00071, section 3.1 and appendix B.2): for rows of T tokens and an original context L < T

    theta' = theta · (factor · T / L - (factor - 1)) ^ (R / (R - 2))

transformers uses the longest position of a batch as T. Here T is the run's sequence length, so that RoPE
does not depend on the documents in a batch, and is equal on every rank. R is the number of rotated features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gangline.config import PositiveFloat, PositiveInt
from gangline_basics.model.rope_rates import RopeScaling, compute_plain_rates
from gangline_models.rope.base import RopeChoice


@dataclass(frozen=True)
class BaseScaling(RopeScaling):
    """RoPE scaling by another base; `stretch` is the term in parentheses of the formula."""

    stretch: float

    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        return compute_plain_rates(theta * self.stretch ** (width / (width - 2)), width)


@dataclass
class DynamicRope(RopeChoice):
    """Options of dynamic NTK RoPE scaling: the base grows with the row length beyond the original context."""

    kind: ClassVar[str] = "dynamic"
    words: ClassVar[Mapping[str, str]] = {"factor": "factor", "original_max_position": "max_position_embeddings"}
    needed: ClassVar[tuple[str, ...]] = ("factor",)

    factor: PositiveFloat = 2.0  # scaling factor: how much the RoPE base grows with the row length
    original_max_position: PositiveInt = 2048  # original context length in tokens: shorter rows are unscaled

    def make_scaling(self, length: int) -> RopeScaling:
        length = max(length, self.original_max_position)
        return BaseScaling(self.factor * length / self.original_max_position - (self.factor - 1))

    def to_json(self) -> dict[str, object]:
        return {"rope_type": self.kind, "factor": self.factor}

    def compute_max_position(self, trained: int) -> int:
        return self.original_max_position
