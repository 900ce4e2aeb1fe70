"""Dynamic NTK-aware RoPE scaling: the base grows with row length, so long wavelengths grow most. Torch-free.

Peng et al. (YaRN, arXiv 2309.00071, section 3.1 and appendix B.2): with T tokens beyond the L that a model was made for

    theta' = theta · (factor · T / L - (factor - 1)) ^ (R / (R - 2))

transformers uses the longest position of a batch as T. Here T is the length of the run's rows: a batch of shorter
documents is rotated as any other, and equally on every rank.
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
    """Scaling by another base; `stretch` is the bracket of the formula."""

    stretch: float

    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        return compute_plain_rates(theta * self.stretch ** (width / (width - 2)), width)


@dataclass
class DynamicRope(RopeChoice):
    """Dynamic NTK scaling: the base grows with the rows' length beyond the original context."""

    kind: ClassVar[str] = "dynamic"
    words: ClassVar[Mapping[str, str]] = {"factor": "factor", "original_max_position": "max_position_embeddings"}
    needed: ClassVar[tuple[str, ...]] = ("factor",)

    factor: PositiveFloat = 2.0  # factor of the base's growth with the length
    original_max_position: PositiveInt = 2048  # original context length in tokens, up to which RoPE is unscaled

    def make_scaling(self, length: int) -> RopeScaling:
        length = max(length, self.original_max_position)
        return BaseScaling(self.factor * length / self.original_max_position - (self.factor - 1))

    def to_json(self) -> dict[str, object]:
        return {"rope_type": self.kind, "factor": self.factor}

    def compute_max_position(self, trained: int) -> int:
        return self.original_max_position
