"""Muon: orthogonalised momentum for matrices (Jordan et al. 2024, kellerjordan.github.io/posts/muon).

    B <- μ B + (1 - μ) G                      momentum, sharded like the parameter
    U <- (1 - μ) G + μ B                      Nesterov's look-ahead, or B itself
    O <- NewtonSchulz(U)                      of the full matrix, on one rank for all ranks
    W <- (1 - η λ) W - η 0.2 sqrt(max(m, n)) O

The factor 0.2 sqrt(max(m, n)) gives an update the RMS of a typical AdamW update (Liu et al., Muon is Scalable, arXiv
2502.16982, section 2.2), so one learning rate suits both. `torch.optim.Muon` applies the same factor with
`adjust_lr_fn="match_rms_adamw"`, but only supports unsharded 2-D tensors, and always uses bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.plan import choose_by_pattern
from gangline.runtime import MatrixId, Runtime, ShardedParam
from gangline.shard import Shard, name_model_array
from gangline_basics.optimizer.adamw import AdamwOptimizer
from gangline_basics.optimizer.config import Muon
from gangline_basics.optimizer.pieces import get_decay, list_block_matrices, state_shard

QUINTIC = (3.4445, -4.7750, 2.0315)  # Jordan's coefficients: steep at zero, so few iterations suffice


def orthogonalise(matrix: Tensor, iterations: int = 5, eps: float = 1e-7) -> Tensor:
    """Return approximately U Vᵀ of the singular value decomposition of an (m, n) matrix: all singular values near 1.

    Newton-Schulz iteration on X / |X|: X <- a X + (b A + c A²) X with A = X Xᵀ. The dtype is bfloat16 on a GPU, for
    which the iteration was designed, and the dtype of the matrix on a CPU.
    """
    a, b, c = QUINTIC
    x = matrix.bfloat16() if matrix.is_cuda else matrix.clone()
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(iterations):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).to(matrix.dtype)


class MuonOptimizer(Optimizer):
    """Muon for `matrices`, AdamW for `rest`. names: (names of matrices, names of rest) on all pipeline stages."""

    def __init__(
        self,
        config: Muon,
        runtime: Runtime,
        matrices: Sequence[ShardedParam],
        rest: Sequence[ShardedParam],
        names: tuple[Sequence[str], Sequence[str]],
        deterministic: bool,
    ) -> None:
        self.config, self.runtime, self.matrices = config, runtime, matrices
        self._rest = AdamwOptimizer(config, runtime, rest, names[1], deterministic)
        self._momenta = [
            [torch.zeros_like(piece.tensor, requires_grad=False) for piece in parameter.pieces]
            for parameter in matrices
        ]
        arrays = [name_model_array(name) for name in names[0]]
        self.registry = self._rest.registry | runtime.registry.add_like("optimizer/momentum", arrays)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        config = self.config
        mapped = self.runtime.map_matrices(self._orthogonalise, self._iterate_lookahead())
        for parameter, (_, updates) in zip(self.matrices, mapped, strict=True):
            size = 0.2 * sqrt(max(parameter.shape[-2:]))
            rate, decay = (
                learning_rate * choose_by_pattern(config.lr_multipliers, parameter.name, 1.0),
                get_decay(parameter, config),
            )
            for piece, update in zip(parameter.pieces, updates, strict=True):
                piece.tensor.mul_(1 - rate * decay)
                piece.tensor.add_(update, alpha=-rate * size)
        self._rest.step(learning_rate)

    def _orthogonalise(self, matrix: Tensor, _: MatrixId) -> Tensor:
        return orthogonalise(matrix, self.config.ns_steps)

    def _iterate_lookahead(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Update the momentum of each matrix, and yield (name, matrices to orthogonalise)."""
        mu = self.config.momentum
        for parameter, momenta in zip(self.matrices, self._momenta, strict=True):
            gradients: list[Tensor] = [piece.tensor.grad for piece in parameter.pieces]  # type: ignore[misc]
            for momentum, gradient in zip(momenta, gradients, strict=True):
                momentum.lerp_(gradient, 1 - mu)
            ahead = [gradient.lerp(momentum, mu) for gradient, momentum in zip(gradients, momenta, strict=True)]
            yield parameter.name, ahead if self.config.nesterov else momenta

    def shards(self) -> Iterator[Shard]:
        for parameter, momenta in zip(self.matrices, self._momenta, strict=True):
            for piece, momentum in zip(parameter.pieces, momenta, strict=True):
                yield state_shard("momentum", parameter.name, piece, momentum)
        yield from self._rest.shards()

    def state(self) -> dict[str, Any]:
        return self._rest.state()

    def load_state(self, state: dict[str, Any]) -> None:
        self._rest.load_state(state)


def build(config: Muon, run: Run, runtime: Runtime) -> MuonOptimizer:
    """Return the optimizer `muon`: Muon for matrices and stacks in the blocks of the plan, AdamW for all others."""
    parameters, matrices = runtime.parameters(), list_block_matrices(run, runtime)
    return MuonOptimizer(
        config,
        runtime,
        [p for p in parameters if p.name in matrices],
        [p for p in parameters if p.name not in matrices],
        (list(matrices), [name for name in runtime.names() if name not in matrices]),
        run.deterministic,
    )
