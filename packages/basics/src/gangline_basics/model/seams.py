"""From a model's tree and plan to what is computed at each of its seams. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gangline.model.calls import Call
from gangline.model.tree import Node, iterate_nodes
from gangline.plan import Plan, names


def find_call(node: Node, seam: str) -> Call | None:
    """What `node` says its module computes at the seam of that name; None: it says nothing.

    A class that names another module than its base and does not override `get_seams` says nothing:
    what the base says is of the base's module.
    """
    return node.get_seams().get(seam) if _says(node, "get_seams") else None


def list_recomputed(tree: Node) -> list[str]:
    """Paths and classes of the nodes that do not say how their modules take one more token (`Node.get_decoding`)."""
    return [
        f"{path or 'the model'} ({type(node).__name__})"
        for path, node in iterate_nodes(tree)
        if not _says(node, "get_decoding") or node.get_decoding() is None
    ]


def _says(node: Node, method: str) -> bool:
    """Whether what `method` says is of the module that the node's very class names, not of a base's."""
    for cls in type(node).__mro__:
        if method in vars(cls):
            return True
        if "module" in vars(cls):
            return False
    return False


def get_calls(tree: Node, plan: Plan, seam: Literal["attention", "loss"]) -> dict[str, Call | None]:
    """Path of a node -> what is computed at the seam of its module; None: *unknown*, for nobody says it.

    Those are the nodes that the plan's patterns name, or where such a node says nothing (a wrapper) the nodes in it
    that do. Of attention each block without any such node is unknown as well: it may mix tokens in its own way.
    """
    patterns = [place.pattern for place in plan.seams if place.name == seam]
    calls: dict[str, Call | None] = {}
    for path, node in iterate_nodes(tree):
        if any(names(pattern, path) for pattern in patterns):
            calls |= _find_calls(node, path, seam) or {path: None}
    if seam == "attention" and patterns:
        by_path = dict(iterate_nodes(tree))
        for index in range(plan.layers):
            block = f"{plan.blocks}.{index}"
            if block in by_path and not any(path == block or path.startswith(f"{block}.") for path in calls):
                calls |= _find_calls(by_path[block], block, seam) or {block: None}
    return calls


def _find_calls(node: Node, path: str, seam: str) -> dict[str, Call | None]:
    return {inner: call for inner, each in iterate_nodes(node, path) if (call := find_call(each, seam)) is not None}


def call_at(calls: Mapping[str, Call | None], path: str) -> Call | None:
    """Return what `get_calls` found for the module at `path`: for its own node, else for the nearest one around it."""
    while path:
        if path in calls:
            return calls[path]
        path = path.rpartition(".")[0]
    return None
