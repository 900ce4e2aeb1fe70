"""Model edit `dpo`: replaces the head's cross-entropy by the DPO loss over pairs. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gangline import UserError
from gangline.model.calls import LossCall
from gangline.model.compose import compose_model
from gangline.model.tree import Node, iterate_nodes, map_paths, replace_node
from gangline.plan import Plan
from gangline_basics.model.seams import get_calls
from gangline_finetune.dpo.nodes import DpoHeadNode

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_finetune.dpo.config import DpoConfig


def edit(tree: Node, plan: Plan, options: DpoConfig) -> tuple[Node, Plan, list[str]]:
    """Wrap the head. Raises UserError if its declared loss is not a plain log-likelihood of the targets."""
    call = get_calls(tree, plan, "loss").get(plan.head)
    if not isinstance(call, LossCall) or call.z:
        call_text = "an undeclared loss" if call is None else str(call)
        raise UserError(
            "dpo=on requires a head with a cross-entropy loss and no z-loss.",
            f"The head of this model computes {call_text}.",
        )
    head = DpoHeadNode(inner=map_paths(tree)[plan.head], beta=options.beta)
    return replace_node(tree, plan.head, head), plan, [plan.head]


def find_token_loss(run: Run) -> str | None:
    """Return the path of a module that adds a loss over tokens; None if there is none or the model is invalid."""
    try:
        tree, _ = compose_model(run)
    except UserError:
        return None  # the check that composes the model reports the error
    return next((path for path, node in iterate_nodes(tree) if node.emits_loss()), None)
