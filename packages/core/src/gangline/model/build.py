"""Modules built from a tree of config nodes: first on the meta device, then with memory."""

from __future__ import annotations

from abc import ABC
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from gangline.errors import UserError
from gangline.model.buffers import iterate_buffers, put
from gangline.model.tree import Node, WrapNode, get_parameter_shapes, map_paths
from gangline.plan import Plan
from gangline.plugin.registry import load


class Wrapper(nn.Module, ABC):
    """Base of the class that a `WrapNode` names, which becomes the first base of the wrapped module's new class.

    So the wrapped module keeps its parameter names and stays an instance of its class (a `Linear` that a strategy
    shards); the wrapper's `forward` calls `super().forward(...)`. A wrapper can wrap another wrapper.
    """

    def wrap(self, node: Any) -> None:
        """Build the parameters and modules that the wrapper adds. Called once, instead of a constructor."""


def construct(node: Node) -> Any:
    """Build the module of a node on the meta device: shapes without memory."""
    with torch.device("meta"):
        if not isinstance(node, WrapNode):
            return load(node.module)(node)
        module, wrapper = construct(node.inner), load(node.module)
        module.__class__ = _put_in_front(wrapper, type(module))  # type: ignore[arg-type]
        wrapper.wrap(module, node)
        return module


@lru_cache
def _put_in_front(wrapper: type[Wrapper], inner: type[nn.Module]) -> type[nn.Module]:
    return type(f"{wrapper.__name__}{inner.__name__}", (wrapper, inner), {"__doc__": wrapper.__doc__})


def build_model(tree: Node, plan: Plan) -> Any:
    """Build the complete model on the meta device, for a strategy; frozen parameters have `requires_grad=False`.

    Raises UserError for parameters that no node declares, because the plan would not shard or count them.
    """
    model = construct(tree)
    _refuse_unsaid(model, tree, plan)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if plan.is_frozen(name):
            parameter.requires_grad_(False)
    return model


def _refuse_unsaid(model: nn.Module, tree: Node, plan: Plan) -> None:
    """Raise UserError for parameters that no node declares in this shape, under any of the parameter's names."""
    node_shapes, tied, nodes = get_parameter_shapes(tree), dict(plan.tied), map_paths(tree)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    unsaid: dict[str, dict[str, tuple[int, ...]]] = {}  # path of the node -> undeclared parameters
    for parameter, aliases in names.items():
        shape = tuple(parameter.shape)
        if not any(node_shapes.get(name) == shape or name in tied for name in aliases):
            path = name = aliases[0]
            while path not in nodes:
                path = path.rpartition(".")[0]
            unsaid.setdefault(path, {})[name[len(path) + 1 if path else 0 :]] = shape
    for path, shapes in unsaid.items():
        kind = type(nodes[path]).__name__
        others = f" {len(unsaid) - 1} more modules have undeclared parameters." if len(unsaid) > 1 else ""
        raise UserError(
            f"parameters of {path or 'the model'} are not declared by its node in this shape: {', '.join(shapes)}.",
            f"Sharding, initialization and memory estimates use the shapes that nodes declare.{others}",
            f"{kind}.get_shapes() must return every parameter that is not in a child node:  {shapes}",
            "The module of a child node must be in the attribute that has the name of the node's field.",
        )


def tie(model: nn.Module, plan: Plan) -> None:
    """Replace each tied parameter by the stored parameter, if this model has both."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for alias, owner in plan.tied:
        if alias in parameters and owner in parameters:
            module, _, name = alias.rpartition(".")
            setattr(model.get_submodule(module), name, parameters[owner])


def materialise(
    model: nn.Module, plan: Plan, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Return the complete model with uninitialized memory on `device`, floats in `dtype`, with tied parameters."""
    buffers = list(iterate_buffers(model))
    if dtype is not None:
        model.to(dtype)
    model.to_empty(device=device)
    tie(model, plan)
    for buffer in buffers:
        put(model, buffer, model.get_buffer(buffer.names[0]))
    return model
