"""Configurations of the built-in optimizers. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from gangline.parts import OptimizerConfig, Part
from gangline.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, ShareBelowOne


@dataclass
class Adamw(OptimizerConfig):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)  # decay of the means of gradient and square
    eps: PositiveFloat = 1e-8  # added to the root of the mean square
    weight_decay: NonNegativeFloat = 0.1  # each step shrinks a matrix by this times the learning rate
    decay_vectors: bool = False  # decay biases and norm gains too, not matrices alone


@dataclass
class Muon(Adamw):
    """Muon for the matrices of the blocks, AdamW for embeddings, head and vectors, under one learning rate."""

    momentum: ShareBelowOne = 0.95  # decay of the mean gradient of a matrix
    nesterov: bool = True  # look one step ahead along the momentum
    iterations: PositiveInt = 5  # of Newton-Schulz

    def states(self, matrix: bool) -> int:
        return 1 if matrix else 2

    def maps_matrices(self) -> bool:
        return True


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
