"""Lion, evolved sign momentum (Chen et al., arXiv 2302.06675, algorithm 2).

    C <- β₁ M + (1 - β₁) G                    interpolation of mean and newest gradient
    W <- (1 - η λ) W - η sign(C)
    M <- β₂ M + (1 - β₂) G

Each weight changes by the learning rate, for any magnitude of its gradient. If a gradient is only rounding error, its
sign is random. The state has one element per weight; AdamW's has two.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.runtime import Runtime
from gangline.shard import Shard, name_model_array
from gangline_basics.optimizer.config import Lion
from gangline_basics.optimizer.pieces import group_pieces, state_shard


class LionOptimizer(Optimizer):
    """Lion; every operation is elementwise, so any sharding works."""

    def __init__(self, config: Lion, runtime: Runtime) -> None:
        self.config = config
        self.registry = runtime.registry.add_like(
            "optimizer/exp_avg", [name_model_array(name) for name in runtime.names()]
        )
        self._groups = list(group_pieces(runtime.parameters(), config).items())
        self._means = [
            [torch.zeros_like(piece.tensor, requires_grad=False) for _, piece in pieces] for _, pieces in self._groups
        ]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        newest, mean_beta = self.config.betas
        for ((rate, decay), pieces), means in zip(self._groups, self._means, strict=True):
            if not pieces:
                continue
            weights = [piece.tensor for _, piece in pieces]
            gradients: list[Tensor] = [x.grad for x in weights]  # type: ignore[misc]
            updates = torch._foreach_lerp(means, gradients, 1 - newest)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(weights, 1 - learning_rate * rate * decay)
            torch._foreach_add_(weights, updates, alpha=-learning_rate * rate)
            torch._foreach_lerp_(means, gradients, 1 - mean_beta)

    def shards(self) -> Iterator[Shard]:
        for (_, pieces), means in zip(self._groups, self._means, strict=True):
            for (name, piece), mean in zip(pieces, means, strict=True):
                yield state_shard("exp_avg", name, piece, mean)


def build(config: Lion, run: Run, runtime: Runtime) -> LionOptimizer:
    """Return the optimizer `lion`."""
    return LionOptimizer(config, runtime)
