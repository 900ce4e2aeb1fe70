"""Options of the precision `fp8`. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gangline import Part
from gangline.config import PrecisionConfig


@dataclass
class Fp8(PrecisionConfig):
    """Compute linear layers of blocks in float8, other ops in bfloat16; keep master weights and state in float32."""

    scaling: Literal["tensor", "row", "block"] = "tensor"  # FP8 scaling granularity: per tensor, row or block of 128

    def get_matmul_format(self) -> str:
        return "fp8"


PARTS = (
    Part(
        name="fp8",
        config=Fp8,
        build="gangline_parallel_megatron_style.precision.fp8:build",
        summary="float8 matmuls, other operations in bfloat16; for Ada, Hopper and newer GPUs, emulated on a CPU",
    ),
)
