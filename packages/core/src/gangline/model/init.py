"""Initial weights: a function of (seed, parameter name), equal under every layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from gangline.draws import fill
from gangline.model.buffers import iterate_buffers
from gangline.model.build import build_model, materialise
from gangline.model.tree import Node
from gangline.plan import Plan
from gangline.plugin.registry import load
from gangline.shard import Shard, name_model_array, parse_parameter


def initialise(shards: Iterable[Shard], plan: Plan, seed: int) -> None:
    """Fill the `model/...` shards of this rank in place with initial values of the global arrays.

    Raises LookupError for an array without an `Init` in the plan.
    """

    def draw(shard: Shard) -> None:
        name = plan.get_owner(parse_parameter(shard.name))
        rule = plan.init(name)
        fill(
            shard.local,
            seed=seed,
            name=name,
            offset=shard.offset,
            shape=shard.global_shape,
            distribution=rule.distribution,
            scale=rule.scale,
        )

    for shard in shards:
        fill_as_stored(shard, plan, draw)


def fill_as_stored(shard: Shard, plan: Plan, fill: Callable[[Shard], None]) -> None:
    """Fill a `model/...` shard with the stored form of its weight: low-bit if the plan has a `LowBit` rule.

    fill: function that fills a shard with the weight in full precision. Raises the errors of the rule's `LowBit.codes`.
    """
    rule = plan.find_low_bit(plan.get_owner(parse_parameter(shard.name)))
    if rule is not None and rule.codes:
        load(rule.codes)(shard, plan, fill)
        return
    fill(shard)
    if rule is not None:
        shard.local.copy_(shard.local.to(getattr(torch, rule.dtype)))


def make_whole_model(
    tree: Node, plan: Plan, *, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> nn.Module:
    """Return a complete model with its initial weights, for use without a strategy."""
    model = materialise(build_model(tree, plan), plan, device=device, dtype=dtype)
    initialise(list_shards(model, plan), plan, seed)
    return model


def list_shards(model: nn.Module, plan: Plan) -> list[Shard]:
    """Return the parameters and persistent buffers of an unsharded model as complete `model/...` shards."""
    duplicates = {name for buffer in iterate_buffers(model) for name in buffer.names if name != buffer.saved_name}
    return [
        Shard(name_model_array(name), tuple(tensor.shape), tensor.dtype, (0,) * tensor.dim(), tensor)
        for name, tensor in model.state_dict().items()
        if plan.get_owner(name) == name and name not in duplicates
    ]
