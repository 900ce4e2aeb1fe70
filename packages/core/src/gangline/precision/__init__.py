"""Which numbers a run computes with: what a precision imports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline.plugin.lazy import lazily

if TYPE_CHECKING:
    from gangline.precision.base import Precision as Precision
    from gangline.precision.config import Bf16 as Bf16, Fp16 as Fp16, Fp32 as Fp32, Fp64 as Fp64

__getattr__, __all__ = lazily(
    __name__,
    {
        "gangline.precision.base": "Precision",
        "gangline.precision.config": "Bf16 Fp16 Fp32 Fp64",
    },
)
