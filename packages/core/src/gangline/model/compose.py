"""The model of a run: its part's tree and plan, then the edits the user switched on. Torch-free."""

from __future__ import annotations

from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.plugins import build, installed, load


def compose_model(run: Run) -> tuple[Node, Plan]:
    """The tree and the plan, edited in order of group name.

    Raises UserError where two edits claim one node, or one claims a node inside another's.
    """
    tree, plan = build(run.model, run)
    claims: dict[str, str] = {}
    for group, options in sorted(run.edits.items()):
        edit = load(installed().part_of(options).part.build)
        tree, plan, claimed = edit(tree, plan, options.resolved(run))
        for path in claimed:
            for other, owner in claims.items():
                if _overlap(path, other):
                    raise _conflict(owner, other, group, path)
        claims.update(dict.fromkeys(claimed, group))
    return tree, plan


def _overlap(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _conflict(first: str, first_path: str, second: str, second_path: str) -> UserError:
    what = first_path if first_path == second_path else f"{first_path} and {second_path}"
    return UserError(
        f"the model edits {first} and {second} both want {what}",
        "Each part of a model can be replaced by one edit.",
        f"Switch one off: {first}=off or {second}=off.",
    )
