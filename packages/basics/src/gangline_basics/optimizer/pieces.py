"""Pieces of parameters as optimizers take them: those with the same rate and decay together, and their state."""

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
    """(factor of the learning rate, weight decay) -> the pieces that have these, each with its parameter's name."""
    alike: dict[tuple[float, float], list[tuple[str, ParamShard]]] = {}
    for p in named:
        key = choose_by_pattern(config.rates, p.name, 1.0), get_decay(p, config)
        alike.setdefault(key, []).extend((p.name, piece) for piece in p.pieces)
    return alike


def state_shard(state: str, name: str, piece: ParamShard, tensor: Tensor) -> Shard:
    """The shard of optimizer state `tensor`, which has the box of that piece of parameter `name`."""
    of = piece.shard
    return Shard(f"optimizer/{state}/{name}", of.global_shape, tensor.dtype, of.offset, tensor, of.primary)


def get_decay(parameter: ShardedParam, config: DecayingConfig) -> float:
    """Its weight decay: what `decay` says of its name, else that of matrices and stacks, and of vectors on demand."""
    touched = is_matrix(parameter.name, parameter.shape) or config.decay_vectors
    return choose_by_pattern(config.decay, parameter.name, config.weight_decay if touched else 0.0)


def list_block_matrices(run: Run, runtime: Runtime) -> dict[str, None]:
    """The names of what is mapped as matrices, in the blocks that the plan names, on whatever stage, in order."""
    _, plan = compose_model(run)
    shapes = ((name, runtime.registry[name_model_array(name)].shape) for name in runtime.names())
    return {name: None for name, shape in shapes if is_mapped(name, shape) and matches(plan.blocks, name)}
