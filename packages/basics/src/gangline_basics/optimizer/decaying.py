"""Options of optimizers with learning rates and weight decay per parameter name. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gangline.config.ranges import NonNegativeFloat, PositiveFloat
from gangline.config.schema import OptimizerConfig
from gangline.errors import Problem

if TYPE_CHECKING:
    from gangline.config.schema import Run


@dataclass
class DecayingConfig(OptimizerConfig):
    """Optimizer with decoupled weight decay; learning rate and weight decay can be set per parameter name."""

    weight_decay: NonNegativeFloat = 0.1  # decoupled weight decay; a step scales matrices by 1 - learning rate · decay
    decay_vectors: bool = False  # weight decay also for vectors: biases and norm weights
    # learning rate multipliers by parameter or module name: {embed: 0.1}
    lr_multipliers: dict[str, PositiveFloat] = field(default_factory=dict)
    weight_decay_overrides: dict[str, NonNegativeFloat] = field(
        default_factory=dict
    )  # weight decay by parameter or module name: {embed: 0}

    def check(self, run: Run) -> list[Problem]:
        problems = super().check(run)
        for option, patterns in (
            ("lr_multipliers", self.lr_multipliers),
            ("weight_decay_overrides", self.weight_decay_overrides),
        ):
            problems += _find_unmatched(run, f"optimizer.{option}", patterns)
        return problems


def _find_unmatched(run: Run, option: str, patterns: Iterable[str]) -> list[Problem]:
    """Return a problem for each pattern that matches no trained parameter."""
    from gangline.config.suggest import suggest_near
    from gangline.model.compose import compose_model
    from gangline.model.tree import get_parameter_shapes
    from gangline.plan import matches

    patterns = list(patterns)
    if not patterns:
        return []
    tree, plan = compose_model(run)
    names = [name for name in get_parameter_shapes(tree) if not plan.is_frozen(name)]
    modules = [".".join(name.split(".")[:length]) for name in names for length in range(1, name.count(".") + 2)]
    blocks = plan.blocks + "."
    paths = list(dict.fromkeys(re.sub(rf"^({re.escape(blocks)})\d+", r"\1*", name) for name in modules))
    problems = []
    for pattern in patterns:
        if any(matches(pattern, name) for name in names):
            continue
        tied = [owner for alias, owner in plan.tied if matches(pattern, alias)]
        why = f"The parameter is tied, and stored as {tied[0]}." if tied else suggest_near(pattern, paths)
        fix = f"A pattern is a parameter or module path; * matches one component. Paths: {', '.join(paths[:6])}, ..."
        problems.append(Problem(f"{option}: {pattern!r} matches no trained parameter.", why, fix))
    return problems
