"""Configurations of the built-in reductions of gradients. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from gangline.config.ranges import NonNegativeInt
from gangline.config.schema import GradientsConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part
from gangline_basics.precision.config import Fp16

if TYPE_CHECKING:
    from gangline.config.schema import Run

CHUNK = 256  # gradients that share a scale under gradients=onebit


@dataclass
class SumGradients(GradientsConfig):
    """Gradients are summed as they are."""

    plain: ClassVar[bool] = True


@dataclass
class RoundedGradients(GradientsConfig):
    """Gradients are rounded to bfloat16 on the wire, and added in the dtype of the precision."""

    def count_wire_bytes(self, itemsize: int) -> float:
        return 2.0


@dataclass
class SignGradients(GradientsConfig):
    """The sign of each gradient and one scale for every 256 of them, with error feedback."""

    start_step: NonNegativeInt = 100  # first step whose gradients are compressed; earlier ones are summed as they are

    def check(self, run: Run) -> list[Problem]:
        if not isinstance(run.precision, Fp16):
            return []
        why = "Error feedback keeps what a step lost, and steps that overflow under a loss scale leave inf in it."
        return [
            Problem("gradients=onebit does not work with precision=fp16.", why, "precision=bf16, or gradients=bf16.")
        ]

    def count_wire_bytes(self, itemsize: int) -> float:
        return (1 + 32 / CHUNK) / 8

    def count_kept(self, size: int, ranks: int, scatters: bool) -> int:
        return size + (0 if scatters else size // ranks)


PARTS = (
    Part(
        name="sum",
        config=SumGradients,
        build="gangline_basics.gradients.plain:build",
        summary="Gradients are summed over data-parallel ranks as they are",
        default=True,
    ),
    Part(
        name="bf16",
        config=RoundedGradients,
        build="gangline_basics.gradients.coded:build_rounded",
        summary="Gradients are rounded to bfloat16 on the wire: half of the bytes",
        layout_dependent="each data-parallel rank's gradients are rounded to bfloat16, so losses depend on how the "
        "batch is divided",
    ),
    Part(
        name="onebit",
        config=SignGradients,
        build="gangline_basics.gradients.coded:build_signs",
        summary="Gradients travel as signs with error feedback: about one bit each",
        layout_dependent="each data-parallel rank sends the signs of its gradients and a scale, and adds what that "
        "lost to the next ones, so losses and gradients are those of one process only on average",
    ),
)
