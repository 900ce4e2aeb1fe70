"""Rates (frequencies) of rotary position embeddings: base of the wavelengths, and scaling. Torch-free.

C width of a head, of which the first R features are rotated in R/2 pairs
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling(ABC):
    """Scaling of RoPE rates to a longer context than the model was trained with."""

    @abstractmethod
    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        """Compute the rate of each of the width/2 pairs of features, in radians per position."""

    @property
    def magnitude(self) -> float:
        """Factor that multiplies the rotated queries and keys."""
        return 1.0


def compute_plain_rates(theta: float, width: int) -> tuple[float, ...]:
    """Compute theta^(-2i/R) for i < R/2."""
    return tuple(theta ** (-2 * i / width) for i in range(width // 2))


@dataclass(frozen=True)
class BandScaling(RopeScaling):
    """Scaling that stretches long wavelengths only (`apply_scaling` in Meta's reference code for Llama 3.1).

    Wavelengths above original_max_position / low_freq_factor are multiplied by `factor`. Wavelengths below
    original_max_position / high_freq_factor are unchanged. Between the two bounds the rate is interpolated.
    """

    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        low, high = self.low_freq_factor, self.high_freq_factor
        scaled = []
        for rate in compute_plain_rates(theta, width):
            # number of full rotations over the original context
            turns = self.original_max_position * rate / (2 * math.pi)
            keep = min(1.0, max(0.0, (turns - low) / (high - low)))
            scaled.append(keep * rate + (1 - keep) * rate / self.factor)
        return tuple(scaled)


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: the base of the wavelengths, their scaling, and the rotated part of a head.

    width  number of rotated features of each head, from the first on; None: all features
    """

    theta: float = 10_000.0
    scaling: RopeScaling | None = None
    width: int | None = None


PLAIN_ROPE = Rope()


def compute_frequencies(rope: Rope, head_dim: int) -> tuple[float, ...]:
    """Compute the rate of each rotated pair of features, in radians per position."""
    width = head_dim if rope.width is None else rope.width
    return (
        compute_plain_rates(rope.theta, width)
        if rope.scaling is None
        else rope.scaling.compute_rates(rope.theta, width)
    )
