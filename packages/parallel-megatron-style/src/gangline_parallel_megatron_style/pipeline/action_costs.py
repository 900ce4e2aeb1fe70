"""How long the actions of a schedule take: computed (`cost.timing`), measured, or all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gangline_parallel_megatron_style.pipeline.actions import KINDS, Kind


@dataclass(frozen=True)
class ActionCosts:
    """Time of each kind of action on one stage (one chunk of one rank), in any one unit."""

    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    B: float | None = None  # None: I + W

    def of(self, kind: Kind) -> float:
        return self.I + self.W if kind == "B" and self.B is None else getattr(self, kind)


UNIFORM = ActionCosts()


def per_stage(costs: ActionCosts | Sequence[ActionCosts], stages: int) -> list[ActionCosts]:
    """The costs of each stage, from those of every stage or a list.

    Raises ValueError where the list does not fit, and for an action that takes no time: in the order of their ends an
    action then need not come after what it needs.
    """
    each = [costs] * stages if isinstance(costs, ActionCosts) else list(costs)
    if len(each) != stages:
        raise ValueError(f"costs of {len(each)} stages for a schedule of {stages}")
    if any(cost.of(kind) <= 0 for cost in each for kind in KINDS):
        raise ValueError("every action of a schedule takes some time")
    return each
