"""Gating of a feed-forward layer, a field of its config node. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Gating:
    """out = activation(min(gate, limit)) · (clip(up, -limit, limit) + offset).

    activation  "silu": x · sigmoid(slope · x) (SwiGLU; Shazeer, arXiv 2002.05202, section 2), "gelu_tanh": GEGLU
    slope       sigmoid slope; with 1.702 silu approximates GELU (Hendrycks and Gimpel, arXiv 1606.08415, section 2)
    limit       bound of gate and up (gpt-oss, arXiv 2508.10925, section 2.2); None: no bound
    offset      added to `up`

    Raises ValueError for GEGLU with a limit, a slope or an offset, which no model has.
    """

    activation: Literal["silu", "gelu_tanh"] = "silu"
    slope: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __post_init__(self) -> None:
        if self.activation != "silu" and not self.plain:
            raise ValueError(f"gating {self.activation} does not support a slope, a limit or an offset")

    @property
    def plain(self) -> bool:
        """Return whether the gating is activation(gate) · up."""
        return self.slope == 1.0 and self.limit is None and self.offset == 0.0


SWIGLU = Gating()
