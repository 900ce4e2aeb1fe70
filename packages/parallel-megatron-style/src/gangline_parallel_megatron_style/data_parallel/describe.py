"""Shapes, buffers and aliases of a model on the meta device: the input of `sharding.arrays.lay_out`."""

from __future__ import annotations

from torch import nn

from gangline.model.buffers import list_filled_buffers
from gangline.plan import Plan
from gangline.shard import name_dtype
from gangline_parallel_megatron_style.sharding.arrays import ModelShapes


def describe(model: nn.Module, plan: Plan) -> ModelShapes:
    """Return parameter shapes, persistent buffers and aliases; a tied parameter appears once, by its owner's name."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, tuple[str, ...]] = {}
    for alias, parameter in parameters.items():
        owner = plan.get_owner(alias)
        name = names.setdefault(id(parameters.get(owner, parameter)), owner)
        shapes.setdefault(name, tuple(parameter.shape))
        aliases[name] = (*aliases.get(name, ()), alias)
    buffers = {}
    for buffer in list_filled_buffers(model):
        if buffer.saved_name is not None:
            buffers[buffer.saved_name] = tuple(buffer.tensor.shape), name_dtype(buffer.tensor.dtype)
            aliases[buffer.saved_name] = buffer.names
    frozen_names = {name for name in shapes if not parameters[aliases[name][0]].requires_grad}
    return ModelShapes(shapes, buffers, aliases, frozen_names)
