"""Llama 3.1's RoPE scaling: long wavelengths are scaled, short ones not; computed by gangline-basics. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import PositiveFloat, PositiveInt
from gangline_basics.model.rope_rates import BandScaling, RopeScaling
from gangline_models.rope.base import RopeChoice

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass
class Llama3Rope(RopeChoice):
    """Options of Llama 3.1's RoPE scaling: long wavelengths grow, short ones are unscaled."""

    kind: ClassVar[str] = "llama3"
    words: ClassVar[Mapping[str, str]] = {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_max_position": "original_max_position_embeddings",
    }
    needed: ClassVar[tuple[str, ...]] = ("factor", "low_freq_factor", "high_freq_factor")

    factor: PositiveFloat = 8.0  # scaling factor of long RoPE wavelengths
    # limit: RoPE wavelengths above original_max_position / low_freq_factor are fully scaled
    low_freq_factor: PositiveFloat = 1.0
    # limit: RoPE wavelengths below original_max_position / high_freq_factor are unscaled
    high_freq_factor: PositiveFloat = 4.0
    original_max_position: PositiveInt = 8192  # original context length in tokens, before scaling

    def check(self, run: Run) -> list[Problem]:
        if self.high_freq_factor > self.low_freq_factor:
            return []
        return [
            Problem(
                f"model.rope.high_freq_factor={self.high_freq_factor} must be more than "
                f"model.rope.low_freq_factor={self.low_freq_factor}",
                "Wavelengths between the limits of these two factors are partly scaled.",
                f"Set model.rope.high_freq_factor={4 * self.low_freq_factor}.",
            )
        ]

    def make_scaling(self, length: int) -> RopeScaling:
        return BandScaling(self.factor, self.low_freq_factor, self.high_freq_factor, self.original_max_position)

    def compute_max_position(self, trained: int) -> int:
        return round(self.factor * self.original_max_position)
