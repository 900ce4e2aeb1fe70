"""Composition of a run's model: tree and plan of the model's part, then the run's edits. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gangline.config.schema import Run
from gangline.errors import UserError
from gangline.model.edit import Edit
from gangline.model.tree import Node, get_parameter_shapes, iterate_children, iterate_nodes, replace_node
from gangline.plan import Plan
from gangline.plugin.registry import build, installed, load


@dataclass(frozen=True)
class Composed:
    """A run with its composed model: the tree after all edits, and the plan."""

    run: Run
    tree: Node
    plan: Plan

    @classmethod
    def of(cls, run: Run) -> Composed:
        """Compose the model of a run. Raises UserError as `compose_model` does."""
        return cls(run, *compose_model(run))


def compose_model(run: Run) -> tuple[Node, Plan]:
    """Return the tree and the plan after all edits: first edits that replace, then edits that wrap, by group name.

    Raises UserError if two edits, neither of which wraps, claim the same node or nested nodes; if two edits that wrap
    the same node add parameters or modules of one name; and if every parameter is frozen.
    """
    tree, plan = build(run.model, run)
    if run.job.loss_chunk is not None:
        tree, plan = _chunk_losses(tree, plan, run.job.loss_chunk)
    claims: dict[str, str] = {}
    for group, options in sorted(run.edits.items(), key=lambda item: (item[1].wraps, item[0])):
        edit: Edit = load(installed().find_part(options).part.build)
        tree, plan, claimed = edit(tree, plan, options.resolve(run))
        _check_names(tree, group)
        if options.wraps:
            continue
        for path in claimed:
            for other, owner in claims.items():
                if _match_same(path, other):
                    raise _explain_conflict(owner, other, group, path)
        claims.update(dict.fromkeys(claimed, group))
    if all(map(plan.is_frozen, get_parameter_shapes(tree))):
        raise UserError(
            "every parameter of this model is frozen.",
            "A run must train at least one parameter.",
            f"Choose {' or '.join(f'{group}=off' for group in run.edits) or 'another model'}.",
        )
    return tree, plan


def _chunk_losses(tree: Node, plan: Plan, chunk: int) -> tuple[Node, Plan]:
    """Compute losses in chunks of `chunk` tokens in all nodes that support it; nodes of later edits do not change."""
    for path, node in iterate_nodes(tree):
        if (new_node := node.chunk_loss(chunk)) is not node:
            tree = replace_node(tree, path, new_node)
            plan = replace(plan, facts={**plan.facts, "loss_chunk": chunk})
    return tree, plan


def _check_names(tree: Node, group: str) -> None:
    """Raise UserError if two children of a module have the same name, which only an edit that wraps can cause."""
    names: set[str] = set()
    for path, node in iterate_nodes(tree):
        own = [*node.get_shapes(), *(name for name, _ in iterate_children(node) if name)]
        for name in own:
            full = f"{path}.{name}" if path else name
            if full in names:
                raise UserError(
                    f"the model edit {group} adds {full}, which the model already has.",
                    "An edit that wraps a module must not use names of the module's parameters and children.",
                    f"To switch off the edit:  {group}=off",
                )
            names.add(full)


def _match_same(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _explain_conflict(first: str, first_path: str, second: str, second_path: str) -> UserError:
    what = first_path if first_path == second_path else f"{first_path} and {second_path}"
    return UserError(
        f"the model edits {first} and {second} both replace {what}.",
        "Only one edit can replace a module.",
        f"Switch off one of the edits: {first}=off or {second}=off.",
    )
