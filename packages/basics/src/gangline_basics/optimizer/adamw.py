"""AdamW on this rank's pieces of the parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.runtime import ParamShard, Runtime, ShardedParam
from gangline.shard import Shard, name_model_array
from gangline_basics.optimizer.config import Adamw
from gangline_basics.optimizer.pieces import group_pieces, state_shard


class AdamwOptimizer(Optimizer):
    """AdamW with torch's kernels. All state is allocated before the first step, and has global names for checkpoints.

    Uses the fused kernel; under `run.deterministic` the foreach kernel, because the fused kernel rounds the tail of a
    sharded vector differently from the middle.
    """

    def __init__(
        self, config: Adamw, runtime: Runtime, named: Sequence[ShardedParam], names: Sequence[str], deterministic: bool
    ) -> None:
        self._fused = not deterministic
        self._config = config
        self.named = named
        arrays = [name_model_array(name) for name in names]
        model = runtime.registry
        self.registry = model.add_like("optimizer/exp_avg", arrays) | model.add_like("optimizer/exp_avg_sq", arrays)
        self._groups = [
            _Group(rate, decay, pieces, self._fused) for (rate, decay), pieces in group_pieces(named, config).items()
        ]
        self._steps = 0

    def step(self, learning_rate: float) -> None:
        self._steps += 1
        for group in self._groups:
            group.step(learning_rate, self._fused, self._config)

    def shards(self) -> Iterator[Shard]:
        for group in self._groups:
            yield from group.shards()

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        for group in self._groups:
            group.count(self._steps)


class _Group:
    """Pieces with the same learning rate factor and the same weight decay, with their state.

    The state of each piece is two moments and a step counter (torch requires a counter per tensor).
    """

    def __init__(self, rate: float, weight_decay: float, pieces: list[tuple[str, ParamShard]], fused: bool) -> None:
        self.rate, self.weight_decay, self.pieces = rate, weight_decay, pieces
        self.tensors = [piece.tensor for _, piece in pieces]
        self.averages = [torch.zeros_like(x, requires_grad=False) for x in self.tensors]
        self.squares = [torch.zeros_like(x, requires_grad=False) for x in self.tensors]
        # The counters are on the device only for the fused kernel; foreach reads them on the host.
        self._steps = [torch.zeros((), dtype=torch.float32, device=x.device if fused else "cpu") for x in self.tensors]

    def count(self, steps: int) -> None:
        """Set the number of finished steps."""
        for step in self._steps:
            step.fill_(steps)

    @torch.no_grad()
    def step(self, learning_rate: float, fused: bool, config: Adamw) -> None:
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
            lr=learning_rate * self.rate,
            weight_decay=self.weight_decay,
            beta1=config.betas[0],
            beta2=config.betas[1],
            eps=config.eps,
        )

    def shards(self) -> Iterator[Shard]:
        for state, tensors in (("exp_avg", self.averages), ("exp_avg_sq", self.squares)):
            for (name, piece), tensor in zip(self.pieces, tensors, strict=True):
                yield state_shard(state, name, piece, tensor)


def build(config: Adamw, run: Run, runtime: Runtime) -> AdamwOptimizer:
    """Return the optimizer `adamw`."""
    return AdamwOptimizer(config, runtime, runtime.parameters(), runtime.names(), run.deterministic)
