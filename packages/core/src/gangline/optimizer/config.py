"""Configurations of the built-in optimizers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gangline.errors import Problem
from gangline.parts import OptimizerConfig, Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class Adamw(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])  # decay of the means of gradient and square
    eps: float = 1e-8  # added to the root of the mean square
    weight_decay: float = 0.1  # each step shrinks a matrix by this times the learning rate
    decay_vectors: bool = False  # decay biases and norm gains too, not matrices alone

    def check(self, run: Run) -> list[Problem]:
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            return [Problem(f"optimizer.betas={self.betas} must be two numbers in [0, 1).")]
        return []


@dataclass
class Muon(Adamw):
    """Muon for the matrices of the blocks, AdamW for embeddings, head and vectors, under one learning rate."""

    momentum: float = 0.95  # decay of the mean gradient of a matrix
    nesterov: bool = True  # look one step ahead along the momentum
    iterations: int = 5  # of Newton-Schulz

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        if not 0 <= self.momentum < 1:
            problems.append(Problem(f"optimizer.momentum={self.momentum} must be in [0, 1)."))
        if self.iterations < 1:
            problems.append(Problem(f"optimizer.iterations={self.iterations} must be at least 1."))
        return problems


PARTS = (
    Part(
        name="adamw",
        config=Adamw,
        build="gangline.optimizer.adamw:build",
        summary="AdamW; weight decay on matrices alone",
        group="optimizer",
    ),
    Part(
        name="muon",
        config=Muon,
        build="gangline.optimizer.muon:build",
        summary="Muon for the matrices of the blocks, AdamW for the rest",
        group="optimizer",
    ),
)
