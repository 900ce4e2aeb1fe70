"""LongRoPE scaling (Ding et al., arXiv 2402.13753, section 3): a factor per feature pair, found by search. Torch-free.

Rows longer than the original context L use the list `long_factor`, other rows `short_factor`. Queries and keys are
scaled by sqrt(1 + ln(factor) / ln(L)). transformers chooses the list by the longest position of a batch. Here the run's
sequence length chooses it, so that RoPE does not depend on the documents in a batch, and is equal on every rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, ClassVar

from annotated_types import Ge

from gangline import Problem
from gangline.config import PositiveFloat
from gangline_basics.model.rope_rates import RopeScaling, compute_plain_rates
from gangline_models.rope.base import RopeChoice

if TYPE_CHECKING:
    from gangline.config import Run


@dataclass(frozen=True)
class PairwiseScaling(RopeScaling):
    """RoPE scaling of each pair's frequency by its own factor."""

    factors: tuple[float, ...]
    attention_factor: float

    @property
    def magnitude(self) -> float:
        return self.attention_factor

    def compute_rates(self, theta: float, width: int) -> tuple[float, ...]:
        return tuple(
            rate / factor for rate, factor in zip(compute_plain_rates(theta, width), self.factors, strict=True)
        )


@dataclass
class LongRope(RopeChoice):
    """Options of LongRoPE scaling: each wavelength grows by its own factor."""

    kind: ClassVar[str] = "longrope"
    words: ClassVar[Mapping[str, str]] = {
        "factor": "factor",
        "original_max_position": "original_max_position_embeddings",
        "short_factor": "short_factor",
        "long_factor": "long_factor",
        "attention_factor": "attention_factor",
    }
    needed: ClassVar[tuple[str, ...]] = ("short_factor", "long_factor")
    nullable: ClassVar[tuple[str, ...]] = ("factor", "attention_factor")

    factor: PositiveFloat = 32.0  # ratio of the extended to the original context length
    original_max_position: Annotated[int, Ge(2)] = 4096  # original context length in tokens, before scaling
    # scaling factor of each rotated feature pair, for rows of at most original_max_position tokens
    short_factor: list[PositiveFloat] = field(default_factory=list)
    # scaling factor of each rotated feature pair, for rows of more than original_max_position tokens
    long_factor: list[PositiveFloat] = field(default_factory=list)
    attention_factor: PositiveFloat | None = None  # scale of queries and keys; null: formula of the paper

    def check(self, run: Run) -> list[Problem]:
        width: int = getattr(run.model, "rotated", 0)
        wrong = [
            f"{name} has {len(factors)} factors"
            for name, factors in (("short_factor", self.short_factor), ("long_factor", self.long_factor))
            if len(factors) != width // 2
        ]
        if not wrong:
            return []
        what = f"model.rope: {' and '.join(wrong)}, and {width // 2} pairs of features are rotated."
        return [Problem(what, "Each pair needs its own factor.", "gangline import DIR prints the factors of a model.")]

    def make_scaling(self, length: int) -> RopeScaling:
        attention_factor = self.attention_factor
        if attention_factor is None:
            attention_factor = 1.0
            if self.factor > 1:
                attention_factor = math.sqrt(1 + math.log(self.factor) / math.log(self.original_max_position))
        factors = self.long_factor if length > self.original_max_position else self.short_factor
        return PairwiseScaling(tuple(factors), attention_factor)

    def compute_max_position(self, trained: int) -> int:
        return round(self.factor * self.original_max_position)
