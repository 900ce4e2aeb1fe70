"""Configurations of the built-in optimizers. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, ClassVar

from gangline.config.ranges import NonNegativeFloat, PositiveFloat, PositiveInt, ShareBelowOne
from gangline.config.schema import OptimizerConfig
from gangline.errors import Problem
from gangline.plugin.parts import Part

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class DecayingConfig(OptimizerConfig):
    """An optimizer with decoupled weight decay, whose rates and decay may be other ones by name."""

    weight_decay: NonNegativeFloat = 0.1  # each step shrinks a matrix by this times the learning rate
    decay_vectors: bool = False  # decay biases and norm gains too, not matrices alone
    rates: dict[str, PositiveFloat] = field(default_factory=dict)  # factors of the learning rate: {embed: 0.1}
    decay: dict[str, NonNegativeFloat] = field(default_factory=dict)  # in place of weight_decay: {embed: 0}

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        for option, patterns in (("rates", self.rates), ("decay", self.decay)):
            problems += _unmatched(run, f"optimizer.{option}", patterns)
        return problems


@dataclass
class Adamw(DecayingConfig):
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101)."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.95)  # decay of the means of gradient and square
    eps: PositiveFloat = 1e-8  # added to the root of the mean square


@dataclass
class Adamw8bit(Adamw):
    """AdamW with moments in 8 bits (Dettmers et al., arXiv 2110.02861), 2.03 bytes a weight in the place of 8."""

    layout_options: ClassVar[tuple[str, ...]] = ("block",)

    block: PositiveInt = 256  # neighbours of a row that share a scale; no layout may cut inside
    fewest: PositiveInt = 4096  # what has fewer numbers keeps its moments in full, as vectors do

    def coded(self, shape: Sequence[int]) -> bool:
        """Whether the moments of a parameter of this shape are in 8 bits."""
        return len(shape) >= 2 and prod(shape) >= self.fewest

    def states(self, matrix: bool) -> float:
        return 2 * (1 + 4 / self.block) / 4

    def state_bytes(self, shape: Sequence[int], part: Sequence[int], *, matrix: bool, master: int) -> int:
        if not self.coded(shape):
            return 2 * prod(part) * master
        return 2 * prod(part[:-1]) * (part[-1] + 4 * -(-part[-1] // self.block))

    def row_block(self, shape: Sequence[int]) -> int:
        return self.block if self.coded(shape) else 1


@dataclass
class Lion(DecayingConfig):
    """Lion (Chen et al., arXiv 2302.06675): its rate is a third to a tenth of AdamW's, its decay as much larger."""

    learning_rate: NonNegativeFloat = 3e-4
    weight_decay: NonNegativeFloat = 1.0
    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.9, 0.99)  # the mean gradient's share of a step, and its own decay

    def states(self, matrix: bool) -> float:
        return 1


@dataclass
class Muon(Adamw):
    """Muon for the matrices of the blocks, AdamW for embeddings, head and vectors, under one learning rate."""

    momentum: ShareBelowOne = 0.95  # decay of the mean gradient of a matrix
    nesterov: bool = True  # look one step ahead along the momentum
    iterations: PositiveInt = 5  # of Newton-Schulz

    def states(self, matrix: bool) -> float:
        return 1 if matrix else 2

    def maps_matrices(self) -> bool:
        return True


@dataclass
class Soap(Adamw):
    """SOAP (Vyas et al., arXiv 2409.11321) for the matrices of the blocks, AdamW for embeddings, head and vectors."""

    betas: tuple[ShareBelowOne, ShareBelowOne] = (0.95, 0.95)
    shampoo_beta: ShareBelowOne = 0.95  # decay of the means of G Gᵀ and Gᵀ G
    precondition_every: PositiveInt = 10  # steps between two refreshes of the eigenbases
    max_side: PositiveInt = 8192  # a longer side of a matrix keeps the basis that it has
    damping: PositiveFloat = 1e-3  # added to the eigenvalues for a refresh, of their mean

    def sides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The sides of a matrix of this shape that get a basis of their own."""
        return tuple(side for side in shape if side <= self.max_side)

    def states(self, matrix: bool) -> float:
        return 0 if matrix else 2

    def matrix_bytes(self, shape: Sequence[int], *, master: int) -> int:
        return 2 * (prod(shape) + sum(side * side for side in self.sides(shape))) * master

    def maps_matrices(self) -> bool:
        return True


def _unmatched(run: Run, option: str, patterns: Iterable[str]) -> list[Problem]:
    """A problem for each pattern that is of no trained parameter."""
    from gangline.config.suggest import near
    from gangline.model.compose import compose_model
    from gangline.model.tree import parameter_shapes
    from gangline.plan import matches

    patterns = list(patterns)
    if not patterns:
        return []
    tree, plan = compose_model(run)
    names = [name for name in parameter_shapes(tree) if not plan.is_frozen(name)]
    modules = [".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)]
    blocks = plan.blocks + "."
    known = list(dict.fromkeys(re.sub(rf"^({re.escape(blocks)})\d+", r"\1*", name) for name in modules))
    problems = []
    for pattern in patterns:
        if any(matches(pattern, name) for name in names):
            continue
        tied = [owner for alias, owner in plan.tied if matches(pattern, alias)]
        why = f"It is tied, and kept under {tied[0]}." if tied else near(pattern, known)
        mend = (
            f"A pattern names a parameter or a module around it, * any one component, such as {', '.join(known[:6])}."
        )
        problems.append(Problem(f"{option}: {pattern!r} is the name of no parameter that is trained.", why, mend))
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
        name="adamw8bit",
        config=Adamw8bit,
        build="gangline.optimizer.adamw8bit:build",
        summary="AdamW with moments in 8 bits",
        group="optimizer",
    ),
    Part(
        name="lion",
        config=Lion,
        build="gangline.optimizer.lion:build",
        summary="Steps along the sign of the mean gradient",
        group="optimizer",
        law="where a gradient is mere rounding, as a key's bias has it, so is the sign that a weight moves by",
    ),
    Part(
        name="muon",
        config=Muon,
        build="gangline.optimizer.muon:build",
        summary="Muon for the matrices of the blocks, AdamW for the rest",
        group="optimizer",
    ),
    Part(
        name="soap",
        config=Soap,
        build="gangline.optimizer.soap:build",
        summary="SOAP for the matrices of the blocks, AdamW for the rest",
        law="each refresh of a basis amplifies rounding by up to 1 / damping: in float64 layouts agree within 1e-10",
        group="optimizer",
    ),
)
