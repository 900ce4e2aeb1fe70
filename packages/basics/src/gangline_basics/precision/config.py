"""Configurations of the built-in precisions. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline.config.answers import ItemSizes
from gangline.config.ranges import PositiveFloat, PositiveInt
from gangline.config.schema import PrecisionConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class Fp32(PrecisionConfig):
    """Compute, weights, gradients and optimizer state in float32."""

    def get_sizes(self) -> ItemSizes:
        return ItemSizes(compute=4, master=4, gradient=4, wire=4)

    def get_matmul_format(self) -> str:
        return "fp32"


@dataclass
class Fp64(PrecisionConfig):
    """Compute, weights, gradients and optimizer state in float64, to tell rounding errors from bugs."""

    def get_sizes(self) -> ItemSizes:
        return ItemSizes(compute=8, master=8, gradient=8, wire=8)

    def get_matmul_format(self) -> str:
        return "fp64"


@dataclass
class Bf16(PrecisionConfig):
    """Compute in bfloat16; master weights, gradients and optimizer state in float32."""


@dataclass
class Fp16(PrecisionConfig):
    """Compute in float16 under a loss scale; master weights, gradients and optimizer state in float32."""

    finds_scale: ClassVar[bool] = True

    initial_scale: PositiveFloat = 65536.0  # initial loss scale; powers of two cause no rounding
    growth_interval: PositiveInt = 2000  # number of finite steps in a row after which the loss scale doubles
    min_scale: PositiveFloat = 1.0  # minimum loss scale; a step with inf or nan halves the scale

    def get_matmul_format(self) -> str:
        return "fp16"

    def check(self, run: Run) -> list[Problem]:
        if self.initial_scale >= self.min_scale:
            return []
        what = f"precision.initial_scale={self.initial_scale} must be at least precision.min_scale={self.min_scale}."
        return [Problem(what, "", f"precision.min_scale={self.initial_scale}")]


PARTS = (
    Part(
        name="fp32",
        config=Fp32,
        build="gangline_basics.precision.plain:build_fp32",
        summary="Compute, weights and optimizer state in float32",
        default=True,
    ),
    Part(
        name="fp64",
        config=Fp64,
        build="gangline_basics.precision.plain:build_fp64",
        summary="Compute, weights and optimizer state in float64, for tests",
    ),
    Part(
        name="bf16",
        config=Bf16,
        build="gangline_basics.precision.plain:build_bf16",
        summary="Compute in bfloat16, float32 master weights and optimizer state",
    ),
    Part(
        name="fp16",
        config=Fp16,
        build="gangline_basics.precision.fp16:build",
        summary="Compute in float16 with dynamic loss scaling, float32 master weights and optimizer state",
        layout_dependent="sums over tokens are in float16, so overflows and skipped steps depend on microbatch size "
        "and layout",
    ),
)
