"""Configurations of the built-in reductions of gradients. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.config.gradient_sizes import count_ring_bytes
from gangline.config.ranges import NonNegativeInt
from gangline.config.schema import GradientsConfig
from gangline.plugin.parts import Part

CHUNK = 256  # number of gradient elements that share a scale under gradients=onebit


@dataclass
class SumGradients(GradientsConfig):
    """Uncompressed sum of gradients over data-parallel ranks."""

    plain: ClassVar[bool] = True


@dataclass
class RoundedGradients(GradientsConfig):
    """Gradients sent in bfloat16, and summed in the gradient dtype of the precision."""

    def count_sent(self, size: int, ranks: int, scatters: bool, itemsize: int) -> float:
        return count_ring_bytes(2 * size, ranks, scatters)


@dataclass
class SignGradients(GradientsConfig):
    """Gradients sent as signs with one scale for every 256 elements, with error feedback."""

    start_step: NonNegativeInt = 100  # first step with compressed gradients; earlier steps send uncompressed gradients

    def count_sent(self, size: int, ranks: int, scatters: bool, itemsize: int) -> float:
        return count_ring_bytes(size * (1 + 32 / CHUNK) / 8, ranks, scatters)

    def count_state(self, size: int, ranks: int, scatters: bool) -> int:
        return size + (0 if scatters else size // ranks)


PARTS = (
    Part(
        name="sum",
        config=SumGradients,
        build="gangline_basics.gradients.plain:build",
        summary="Uncompressed sum of gradients over data-parallel ranks",
        default=True,
    ),
    Part(
        name="bf16",
        config=RoundedGradients,
        build="gangline_basics.gradients.coded:build_rounded",
        summary="Gradients are sent in bfloat16: half of the bytes of float32",
        layout_dependent="the gradients of each data-parallel rank are rounded to bfloat16, so losses depend on the "
        "split of the batch over ranks",
    ),
    Part(
        name="onebit",
        config=SignGradients,
        build="gangline_basics.gradients.coded:build_signs",
        summary="Gradients are sent as signs with error feedback: about one bit per element",
        layout_dependent="each data-parallel rank sends signs and scales, and adds the encoding error to its "
        "next gradients, so losses and gradients equal those of one process only on average",
    ),
)
