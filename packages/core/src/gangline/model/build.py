"""From a tree of config nodes to modules: first without memory, then with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gangline.model.buffers import buffers_of, put
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.plugins import load


def construct(node: Node) -> Any:
    """The module that a node names, built from it on the meta device: shapes, and no memory."""
    with torch.device("meta"):
        return load(node.module)(node)


def tie(model: nn.Module, plan: Plan) -> None:
    """Make each tied name the very parameter it is kept under, where this model has both."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for alias, owner in plan.tied:
        if alias in parameters and owner in parameters:
            module, _, name = alias.rpartition(".")
            setattr(model.get_submodule(module), name, parameters[owner])


def materialise(
    model: nn.Module, plan: Plan, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Give a whole model uninitialised memory on `device`, floating-point parameters in `dtype`, ties kept."""
    buffers = list(buffers_of(model))
    if dtype is not None:
        model.to(dtype)
    model.to_empty(device=device)
    tie(model, plan)
    for buffer in buffers:
        put(model, buffer, model.get_buffer(buffer.names[0]))
    return model
