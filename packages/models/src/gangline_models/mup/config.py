"""Options of mup=on, and the learning rates that it requires. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gangline import Part, Problem
from gangline.config import EditConfig, PositiveInt
from gangline_basics.optimizer.config import Adamw

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline.plan import Plan


@dataclass
class Mup(EditConfig):
    """Options of `mup=on`, maximal update parametrisation (muP): transfer of learning rates to other widths.

    At width `base_dim` the edit changes nothing. `optimizer.lr_multipliers` must multiply the learning rates of the
    blocks' matrices by base_dim / width: the check refuses other multipliers and prints the required overrides
    (arXiv 2203.03466).
    """

    base_dim: PositiveInt = 256  # base width: model.dim of the model on which learning rates were tuned
    # base head width: head width of the model on which learning rates were tuned; null: this model's head width
    base_head_dim: PositiveInt | None = None

    def check(self, run: Run) -> list[Problem]:
        from gangline.model.compose import compose_model
        from gangline.model.tree import get_parameter_shapes
        from gangline.plan import choose_by_pattern

        optimizer = run.optimizer
        if not isinstance(optimizer, Adamw) or optimizer.maps_matrices():
            what = "mup=on supports only optimizer=adamw, and this run has another optimizer."
            return [
                Problem(
                    what, "Each optimizer needs its own scaling rules (arXiv 2203.03466, table 8).", "optimizer=adamw"
                )
            ]
        tree, plan = compose_model(run)
        shapes = {name: shape for name, shape in get_parameter_shapes(tree).items() if not plan.is_frozen(name)}
        factors = compute_rate_factors(shapes, plan, plan.facts["dim"] / self.base_dim)
        if all(
            math.isclose(choose_by_pattern(optimizer.lr_multipliers, name, 1.0), factors.get(name, 1.0), rel_tol=1e-3)
            for name in shapes
        ):
            return []
        block = re.compile(rf"^{re.escape(plan.blocks)}\.\d+\.")
        patterns = {block.sub(f"{plan.blocks}.*.", name): rate for name, rate in factors.items()}
        words = ", ".join(f"{pattern}: {rate:.6g}" for pattern, rate in patterns.items())
        what = f"mup=on at a width of {plan.facts['dim']} requires other learning rates for the matrices of the blocks."
        why = f"The multiplier must be {self.base_dim}/{plan.facts['dim']} for these matrices, and 1 for all others."
        return [
            Problem(what, why, f"'optimizer.lr_multipliers={{{words}}}'" if words else "optimizer.lr_multipliers={}")
        ]


def compute_rate_factors(shapes: Mapping[str, tuple[int, ...]], plan: Plan, wider: float) -> dict[str, float]:
    """Return parameter -> learning rate multiplier of the blocks' matrices; {} if `wider` (width / base width) is 1."""
    if wider == 1:
        return {}
    return {name: 1 / wider for name, shape in shapes.items() if len(shape) >= 2 and name.startswith(f"{plan.blocks}.")}


PART = Part(
    name="on",
    group="mup",
    config=Mup,
    build="gangline_models.mup.edit:edit",
    summary="Maximal update parametrisation (muP): learning rates of a narrow model transfer to wide models",
)
