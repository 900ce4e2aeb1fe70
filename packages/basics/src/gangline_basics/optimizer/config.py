"""Configurations of the built-in optimizers. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, ClassVar

from gangline.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, ShareBelowOne
from gangline.plugin.parts import Part
from gangline_basics.optimizer.decaying import DecayingConfig

if TYPE_CHECKING:
    pass


@dataclass
class Adamw(DecayingConfig):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)  # decay of the first and second moment of the gradient
    eps: PositiveFloat = 1e-8  # epsilon added to the square root of the second moment


@dataclass
class Adamw8bit(Adamw):
    """AdamW with 8-bit moments (Dettmers et al., arXiv 2110.02861): 2.03 bytes of state per weight instead of 8."""

    layout_options: ClassVar[tuple[str, ...]] = ("block",)

    block: PositiveInt = 256  # block size: number of adjacent row elements that share a scale; no shard splits a block
    # minimum elements of a matrix for 8-bit moments; smaller matrices and vectors: full precision
    min_8bit_size: PositiveInt = 4096

    def quantises(self, shape: Sequence[int]) -> bool:
        """Return whether the moments of a parameter of this shape are in 8 bits."""
        return len(shape) >= 2 and prod(shape) >= self.min_8bit_size

    def count_states(self, matrix: bool) -> float:
        return 2 * (1 + 4 / self.block) / 4

    def state_bytes(self, shape: Sequence[int], part: Sequence[int], *, matrix: bool, master: int) -> int:
        if not self.quantises(shape):
            return 2 * prod(part) * master
        return 2 * prod(part[:-1]) * (part[-1] + 4 * -(-part[-1] // self.block))

    def count_row_block(self, shape: Sequence[int]) -> int:
        return self.block if self.quantises(shape) else 1


@dataclass
class Lion(DecayingConfig):
    """Lion (Chen et al., arXiv 2302.06675): learning rate 1/10 to 1/3 of AdamW's, weight decay 3 to 10 times that."""

    learning_rate: NonNegativeFloat = 3e-4
    weight_decay: NonNegativeFloat = 1.0
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.99)  # interpolation factor of the update, and momentum decay

    def count_states(self, matrix: bool) -> float:
        return 1


@dataclass
class Muon(Adamw):
    """Muon for the matrices of the blocks, AdamW for embeddings, head and vectors, with one learning rate."""

    momentum: ShareBelowOne = 0.95  # Muon momentum: decay of the moving average of a matrix's gradients
    nesterov: bool = True  # Nesterov momentum for the matrices
    ns_steps: PositiveInt = 5  # number of Newton-Schulz iterations per step

    def count_states(self, matrix: bool) -> float:
        return 1 if matrix else 2

    def maps_matrices(self) -> bool:
        return True


@dataclass
class Soap(Adamw):
    """SOAP (Vyas et al., arXiv 2409.11321) for the matrices of the blocks, AdamW for embeddings, head and vectors."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.95, 0.95)
    shampoo_beta: ShareBelowOne = 0.95  # decay of the running means of G Gᵀ and Gᵀ G of a gradient matrix G
    precondition_frequency: PositiveInt = 10  # interval between refreshes of the eigenbases, in steps
    # maximum size of a dimension with an eigenbasis; larger dimensions stay in the original basis
    max_precond_dim: PositiveInt = 8192
    damping: PositiveFloat = 1e-3  # damping added to the eigenvalues at a refresh, as a fraction of their mean

    def list_sides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the dimensions of a matrix of this shape that get an eigenbasis."""
        return tuple(side for side in shape if side <= self.max_precond_dim)

    def count_states(self, matrix: bool) -> float:
        return 0 if matrix else 2

    def count_matrix_bytes(self, shape: Sequence[int], *, master: int) -> int:
        return 2 * (prod(shape) + sum(side * side for side in self.list_sides(shape))) * master

    def maps_matrices(self) -> bool:
        return True


PARTS = (
    Part(
        name="adamw",
        config=Adamw,
        build="gangline_basics.optimizer.adamw:build",
        summary="AdamW, with weight decay of matrices only",
        default=True,
        synonyms={
            "weight_decay": "wd",
            "eps": "epsilon adam_epsilon",
            "lr_multipliers": "rates lr_mult",
            "weight_decay_overrides": "decay wd_mult",
        },
    ),
    Part(
        name="adamw8bit",
        config=Adamw8bit,
        build="gangline_basics.optimizer.adamw8bit:build",
        summary="AdamW with 8-bit moments",
        synonyms={"min_8bit_size": "fewest"},
    ),
    Part(
        name="lion",
        config=Lion,
        build="gangline_basics.optimizer.lion:build",
        summary="Lion: updates by the sign of the mean gradient",
        layout_dependent="if a gradient is only rounding error, as for the bias of a key, the sign of the update is "
        "random",
    ),
    Part(
        name="muon",
        config=Muon,
        build="gangline_basics.optimizer.muon:build",
        summary="Muon for the matrices of the blocks, AdamW for the rest",
        synonyms={"ns_steps": "iterations"},
    ),
    Part(
        name="soap",
        config=Soap,
        build="gangline_basics.optimizer.soap:build",
        summary="SOAP for the matrices of the blocks, AdamW for the rest",
        synonyms={"precondition_frequency": "precondition_every", "max_precond_dim": "max_side"},
        layout_dependent="each refresh of a basis amplifies rounding errors by up to 1 / damping: in float64, layouts "
        "agree within 1e-10",
    ),
)
