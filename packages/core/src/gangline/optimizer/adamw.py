"""AdamW on the pieces of a runtime's parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gangline.config.schema import Run
from gangline.optimizer.base import Optimizer
from gangline.optimizer.config import Adamw
from gangline.runtime import ParamShard, Runtime, ShardedParam
from gangline.shard import Shard, model_array


class AdamwOptimizer(Optimizer):
    """torch's AdamW kernels on state of our own, so that it exists before the first step and has global names.

    Fused; under `run.deterministic` foreach, because the fused kernel rounds the tail of a cut vector in another way
    than its middle.
    """

    def __init__(
        self, config: Adamw, runtime: Runtime, named: Sequence[ShardedParam], names: Sequence[str], deterministic: bool
    ) -> None:
        self._fused = not deterministic
        self._config = config
        self.named = named
        arrays = [model_array(name) for name in names]
        model = runtime.registry
        self.registry = model.like("optimizer/exp_avg", arrays) | model.like("optimizer/exp_avg_sq", arrays)
        self._groups = [
            _Group(
                weight_decay,
                [(p.name, piece) for p in named if decays(p, config) == bool(weight_decay) for piece in p.pieces],
            )
            for weight_decay in dict.fromkeys((config.weight_decay, 0.0))
        ]

    def step(self, learning_rate: float) -> None:
        for group in self._groups:
            group.step(learning_rate, self._fused, self._config)

    def shards(self) -> Iterator[Shard]:
        for group in self._groups:
            yield from group.shards()

    def state(self) -> dict[str, Any]:
        return {"steps": max((group.steps for group in self._groups), default=0)}

    def load_state(self, state: dict[str, Any]) -> None:
        for group in self._groups:
            group.steps = int(state["steps"])


class _Group:
    """Pieces with the same weight decay, their moments and their step counters (torch wants one each)."""

    def __init__(self, weight_decay: float, pieces: list[tuple[str, ParamShard]]) -> None:
        self.weight_decay, self.pieces = weight_decay, pieces
        self.tensors = [piece.tensor for _, piece in pieces]
        self.averages = [torch.zeros_like(x, requires_grad=False) for x in self.tensors]
        self.squares = [torch.zeros_like(x, requires_grad=False) for x in self.tensors]
        self._steps = [torch.zeros((), dtype=torch.float32, device=x.device) for x in self.tensors]
        self._count = 0

    @property
    def steps(self) -> int:
        return self._count

    @steps.setter
    def steps(self, count: int) -> None:
        self._count = count
        for step in self._steps:
            step.fill_(count)

    @torch.no_grad()
    def step(self, learning_rate: float, fused: bool, config: Adamw) -> None:
        self._count += 1
        if not self.tensors:
            return
        gradients: list[Tensor] = [x.grad for x in self.tensors]  # type: ignore[misc]
        adamw(
            self.tensors,
            gradients,
            self.averages,
            self.squares,
            [],
            self._steps,
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            maximize=False,
            lr=learning_rate,
            weight_decay=self.weight_decay,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
        )

    def shards(self) -> Iterator[Shard]:
        for state, tensors in (("exp_avg", self.averages), ("exp_avg_sq", self.squares)):
            for (name, piece), tensor in zip(self.pieces, tensors, strict=True):
                yield state_shard(state, name, piece, tensor)


def state_shard(state: str, name: str, piece: ParamShard, tensor: Tensor) -> Shard:
    """The shard of optimizer state `tensor`, which has the box of that piece of parameter `name`."""
    of = piece.shard
    return Shard(f"optimizer/{state}/{name}", of.global_shape, tensor.dtype, of.offset, tensor, of.primary)


def decays(parameter: ShardedParam, config: Adamw) -> bool:
    """Whether weight decay touches this parameter: matrices and stacks, vectors only on demand."""
    return config.weight_decay != 0 and (len(parameter.shape) >= 2 or config.decay_vectors)


def build(config: Adamw, run: Run, runtime: Runtime) -> AdamwOptimizer:
    """The optimizer `adamw`."""
    return AdamwOptimizer(config, runtime, runtime.parameters(), runtime.names(), run.deterministic)
