"""YaRN RoPE scaling (Peng et al., arXiv 2309.00071): long wavelengths interpolated, short ones kept. Torch-free.

Pair i of R/2 rotated pairs makes L · rate_i / 2π turns over the original context of L tokens (section 3.2). Pairs with
more than beta_fast turns keep their frequency, the frequency of pairs with fewer than beta_slow turns is divided by
`factor`, and in between the blend is linear in i. Queries and keys grow by 0.1 ln(factor) + 1 (section 3.4, eq. 15).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline import Problem
from gangline.config import PositiveFloat, PositiveInt
from gangline_basics.model.rope_rates import RopeScaling, compute_plain_rates
from gangline_models.rope.base import RopeChoice

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass(frozen=True)
class YarnScaling(RopeScaling):
    """YaRN scaling. truncate: round the limits of the blend to integer pair indices, as in the authors' code."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    attention_factor: float

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        low, high = self._compute_pair(self.beta_fast, theta, width), self._compute_pair(self.beta_slow, theta, width)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        high += 0.001 if low == high else 0
        rates = []
        for index, rate in enumerate(compute_plain_rates(theta, width)):
            slowed = min(1.0, max(0.0, (index - low) / (high - low)))
            rates.append(rate / self.factor * slowed + rate * (1 - slowed))
        return tuple(rates)

    def _compute_pair(self, turns: float, theta: float, width: int) -> float:
        """Compute the (fractional) index of the pair that makes `turns` turns over the original context."""
        return width * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass
class YarnRope(RopeChoice):
    """Options of YaRN scaling: long wavelengths grow, short ones are unscaled, attention scores are scaled up."""

    kind: ClassVar[str] = "yarn"
    words: ClassVar[Mapping[str, str]] = {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "attention_factor": "attention_factor",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    }
    needed: ClassVar[tuple[str, ...]] = ("factor",)
    nullable: ClassVar[tuple[str, ...]] = (
        *("factor", "beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    )

    factor: PositiveFloat = 4.0  # scaling factor of long RoPE wavelengths
    original_max_position: PositiveInt = 32_768  # original context length in tokens, before scaling
    beta_fast: PositiveFloat = 32.0  # YaRN beta: feature pairs with more turns over the original context are unscaled
    beta_slow: PositiveFloat = 1.0  # YaRN beta: feature pairs with fewer turns over the original context are scaled
    attention_factor: PositiveFloat | None = None  # scale of queries and keys; null: formula of the paper
    # mscale of DeepSeek: with mscale_all_dim, a null attention_factor is m(mscale) / m(mscale_all_dim), where
    # m(s) = 0.1 · s · ln(factor) + 1; null: off
    mscale: PositiveFloat | None = None
    # mscale_all_dim of DeepSeek: see mscale; model=deepseek_v3 also scales attention scores by m(mscale_all_dim)²;
    # null: off
    mscale_all_dim: PositiveFloat | None = None
    # rounding of the limits between scaled and unscaled feature pairs to integer pair indices
    truncate: bool = True

    def check(self, run: Run) -> list[Problem]:
        if getattr(run.model, "rope_theta", None) != 1:
            return []
        what = "model/rope=yarn does not support model.rope_theta=1"
        return [
            Problem(
                what,
                "All feature pairs then have the same wavelength, so YaRN has no range to blend.",
                "model/rope=plain",
            )
        ]

    def make_scaling(self, length: int) -> RopeScaling:
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = self._compute_magnitude(1.0)
            if self.mscale and self.mscale_all_dim:
                attention_factor = self._compute_magnitude(self.mscale) / self._compute_magnitude(self.mscale_all_dim)
        return YarnScaling(
            self.factor, self.original_max_position, self.beta_fast, self.beta_slow, self.truncate, attention_factor
        )

    def _compute_magnitude(self, scale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * scale * math.log(self.factor) + 1.0

    def compute_max_position(self, trained: int) -> int:
        return round(self.factor * self.original_max_position)
