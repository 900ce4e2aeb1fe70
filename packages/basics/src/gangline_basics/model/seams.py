"""Queries on a model tree: calls at seams, and modules without a decoding cache. Torch-free.

A seam is an attention or loss call that a strategy may replace.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from gangline.model.calls import Call
from gangline.model.tree import Node, iterate_nodes
from gangline.plan import Plan, names


def find_call(node: Node, seam: str) -> Call | None:
    """Return the call that the module of `node` computes at the seam of that name, or None if it is not declared.

    A subclass that sets another `module` must override `get_seams`; otherwise None is returned, because the inherited
    declaration is for the module of the base class.
    """
    return node.get_seams().get(seam) if _says(node, "get_seams") else None


def list_recomputed(tree: Node) -> list[str]:
    """Return paths and classes of nodes that do not declare how modules decode one token (`Node.get_decoding`)."""
    return [
        f"{path or 'the model'} ({type(node).__name__})"
        for path, node in iterate_nodes(tree)
        if not _says(node, "get_decoding") or node.get_decoding() is None
    ]


def _says(node: Node, method: str) -> bool:
    """Return whether `method` is declared for the module of the node's class, not only for that of a base class."""
    for cls in type(node).__mro__:
        if method in vars(cls):
            return True
        if "module" in vars(cls):
            return False
    return False


def get_calls(tree: Node, plan: Plan, seam: Literal["attention", "loss"]) -> dict[str, Call | None]:
    """Return path of a node -> the call at the seam of its module, or None if no node declares the call.

    The nodes match the plan's patterns for the seam. A matching node that declares no call (a wrapper) is replaced by
    its inner nodes that declare a call. For attention, a block without any such node is included as None, because it
    may mix tokens.
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
    """Return the call of `get_calls` for the module at `path`: of its own node, or of the nearest enclosing node."""
    while path:
        if path in calls:
            return calls[path]
        path = path.rpartition(".")[0]
    return None
