"""YaRN (Peng et al., arXiv 2309.00071): long wavelengths interpolated, short ones kept. Torch-free.

Pair i of R/2 makes L · rate_i / 2π turns over the L tokens that the model was made for (section 3.2). Pairs with more
than beta_fast turns keep their rate, those with fewer than beta_slow are slowed by `factor`, and between the pairs
where that happens the share of each goes linearly in i. Queries and keys grow by 0.1 ln(factor) + 1 (section 3.4,
eq. 15).
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
    """truncate: the two pairs between which it blends are whole numbers, as in the authors' code."""

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
        """Which pair, between two as a rule, makes so many turns over the original context."""
        return width * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))


@dataclass
class YarnRope(RopeChoice):
    """Long wavelengths grow, short ones stay, attention is sharpened."""

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

    factor: PositiveFloat = 4.0  # long wavelengths grow by this
    original_max_position: PositiveInt = 32_768  # sequence length that the rotary positions were made for
    beta_fast: PositiveFloat = 32.0  # pairs of more turns than this over that length stay
    beta_slow: PositiveFloat = 1.0  # pairs of fewer turns grow in full
    attention_factor: PositiveFloat | None = None  # queries and keys grow by this; null: as the paper says
    mscale: PositiveFloat | None = None  # with mscale_all_dim: of the paper's 0.1 above the line (DeepSeek)
    mscale_all_dim: PositiveFloat | None = None  # the same below the line
    truncate: bool = True  # blend between whole pairs

    def check(self, run: Run) -> list[Problem]:
        if getattr(run.model, "rope_theta", None) != 1:
            return []
        what = "model.rope_theta=1 does not go with model/rope=yarn"
        return [Problem(what, "All pairs have one wavelength, so there is none to blend from.", "model/rope=plain")]

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
