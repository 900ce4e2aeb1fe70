"""Pieces of parameters for optimizers: grouped by learning rate and weight decay, with their state."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from gangline.config.schema import Run
from gangline.model.compose import compose_model
from gangline.plan import choose_by_pattern, is_mapped, is_matrix, matches
from gangline.runtime import ParamShard, Runtime, ShardedParam
from gangline.shard import Shard, name_model_array
from gangline_basics.optimizer.decaying import DecayingConfig


def group_pieces(
    named: Iterable[ShardedParam], config: DecayingConfig
) -> dict[tuple[float, float], list[tuple[str, ParamShard]]]:
    """Return (learning rate factor, weight decay) -> pieces with both values, as (parameter name, piece)."""
    alike: dict[tuple[float, float], list[tuple[str, ParamShard]]] = {}
    for p in named:
        key = choose_by_pattern(config.lr_multipliers, p.name, 1.0), get_decay(p, config)
        alike.setdefault(key, []).extend((p.name, piece) for piece in p.pieces)
    return alike


def state_shard(state: str, name: str, piece: ParamShard, tensor: Tensor) -> Shard:
    """Return the shard of the optimizer state `tensor`, with the offset of `piece` in the parameter `name`."""
    of = piece.shard
    return Shard(f"optimizer/{state}/{name}", of.global_shape, tensor.dtype, of.offset, tensor, of.primary)


def get_decay(parameter: ShardedParam, config: DecayingConfig) -> float:
    """Return a parameter's `weight_decay_overrides`, else `weight_decay`, or 0 for vectors without `decay_vectors`."""
    touched = is_matrix(parameter.name, parameter.shape) or config.decay_vectors
    return choose_by_pattern(config.weight_decay_overrides, parameter.name, config.weight_decay if touched else 0.0)


def list_block_matrices(run: Run, runtime: Runtime) -> dict[str, None]:
    """Return the names of parameters in the blocks that are optimized as matrices, on all pipeline stages, in order."""
    _, plan = compose_model(run)
    shapes = ((name, runtime.registry[name_model_array(name)].shape) for name in runtime.names())
    return {name: None for name, shape in shapes if is_mapped(name, shape) and matches(plan.blocks, name)}
