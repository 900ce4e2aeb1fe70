"""SOAP: Adam in the eigenbasis of Shampoo, for matrices (Vyas et al., arXiv 2409.11321, algorithm 3).

    G' <- Q_Lᵀ G Q_R                          the gradient in the eigenbasis
    M <- β₁ M + (1 - β₁) G'                   stored in the eigenbasis, like V
    V <- β₂ V + (1 - β₂) G' ⊙ G'
    N <- Q_L (M / (√V + ε)) Q_Rᵀ              M and V bias-corrected, as in Adam
    W <- (1 - η λ) W - η N
    L <- β L + (1 - β) G Gᵀ                   R <- β R + (1 - β) Gᵀ G
    every few steps: Q_L <- QR((L + d) Q_L)   likewise Q_R; M is rotated from the old basis to the new one

The first step computes bases and updates no matrix, so that no gradient is normalised by itself in its own basis.

The complete state of a matrix is on the rank that maps the matrix (`Runtime.find_matrix_owners`); only gradients are
sent to that rank, and updates are sent back. A matrix determines its eigenbasis only if all eigenvalues differ. The
gradient of fewer tokens than rows has many eigenvalues 0; an eigensolver's basis of their eigenspace depends on
rounding, and so on the layout. Therefore a basis is initialized to the identity and updated only by power iterations.
They add d times the mean eigenvalue of L, and ε², to every eigenvalue of L, and make the diagonal of QR's triangular
factor positive, so the basis is a continuous function of all earlier gradients. ε² keeps the identity for a matrix
whose gradients are only rounding errors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from gangline.config.schema import Run
from gangline.optimizer import Optimizer
from gangline.plan import choose_by_pattern
from gangline.runtime import MatrixId, Runtime
from gangline.shard import Layout, Registry, Shard, name_model_array
from gangline_basics.optimizer.adamw import AdamwOptimizer
from gangline_basics.optimizer.config import Soap
from gangline_basics.optimizer.pieces import get_decay, list_block_matrices

FIRST = 8  # number of power iterations in the first step; each later refresh does one


class Side:
    """One dimension of a matrix, of length n: mean of G Gᵀ (or Gᵀ G) and its approximate eigenbasis, both (n, n)."""

    def __init__(self, length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.mean = torch.zeros(length, length, dtype=dtype, device=device)
        self.basis = torch.eye(length, dtype=dtype, device=device)

    def refresh(self, damping: float, least: float) -> None:
        """Run one power iteration, orthonormalised by QR; columns are in descending order of eigenvalues.

        damping: fraction of the mean eigenvalue that is added to every eigenvalue, in addition to `least`.
        """
        length = len(self.mean)
        shift = (damping / length) * self.mean.diagonal().sum() + least
        q, r = torch.linalg.qr(self.mean @ self.basis + shift * self.basis)
        sign = torch.where(r.diagonal() < 0, -1.0, 1.0).to(q.dtype)
        self.basis.copy_(q * sign)


class SoapMatrix:
    """State of an (m, n) matrix. A dimension above `max_precond_dim` has no basis and is not rotated."""

    def __init__(self, shape: tuple[int, int], config: Soap, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config
        self.mean, self.square = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self.left, self.right = (Side(n, dtype, device) if n <= config.max_precond_dim else None for n in shape)

    def update(self, gradient: Tensor, steps: int) -> Tensor:
        """Return the update N, (m, n), for the gradient (m, n) of step number `steps`, from 1."""
        if steps == 1:
            self._see(gradient)
            for _ in range(FIRST):
                self._refresh()
            return torch.zeros_like(gradient)
        (one, two), count = self.config.betas, steps - 1
        turned = self._turn(gradient)
        self.mean.lerp_(turned, 1 - one)
        self.square.mul_(two).addcmul_(turned, turned, value=1 - two)
        size = (self.square / (1 - two**count)).sqrt_().add_(self.config.eps)
        update = self._back((self.mean / (1 - one**count)).div_(size))
        self._see(gradient)
        if count % self.config.precondition_frequency == 0:
            mean = self._back(self.mean)
            self._refresh()
            self.mean.copy_(self._turn(mean))
        return update

    def _see(self, gradient: Tensor) -> None:
        if self.left is not None:
            self.left.mean.lerp_(gradient @ gradient.T, 1 - self.config.shampoo_beta)
        if self.right is not None:
            self.right.mean.lerp_(gradient.T @ gradient, 1 - self.config.shampoo_beta)

    def _refresh(self) -> None:
        for side in (self.left, self.right):
            if side is not None:
                side.refresh(self.config.damping, self.config.eps**2)

    def _turn(self, x: Tensor) -> Tensor:
        x = x if self.left is None else self.left.basis.T @ x
        return x if self.right is None else x @ self.right.basis

    def _back(self, x: Tensor) -> Tensor:
        x = x if self.left is None else self.left.basis @ x
        return x if self.right is None else x @ self.right.basis.T

    def iterate_arrays(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, array) for each array of the state."""
        yield from (("exp_avg", self.mean), ("exp_avg_sq", self.square))
        for name, side in (("left", self.left), ("right", self.right)):
            if side is not None:
                yield from ((name, side.mean), (f"{name}_basis", side.basis))


class SoapOptimizer(Optimizer):
    """SOAP for the parameters named in `matrices` (of all pipeline stages, in order), AdamW for all others."""

    def __init__(self, config: Soap, runtime: Runtime, matrices: Mapping[str, None], deterministic: bool) -> None:
        parameters, names = runtime.parameters(), runtime.names()
        self.config, self.runtime = config, runtime
        self.matrices = [p for p in parameters if p.name in matrices]
        rest = [p for p in parameters if p.name not in matrices]
        self._rest = AdamwOptimizer(
            config, runtime, rest, [name for name in names if name not in matrices], deterministic
        )
        owners, model = runtime.find_matrix_owners(list(matrices)), runtime.registry
        self.registry, self._steps = self._rest.registry | build_registry(config, model, owners), 0
        device = next((piece.tensor.device for p in parameters for piece in p.pieces), torch.device("cpu"))
        self._kept: dict[MatrixId, SoapMatrix] = {}
        for id, owner in owners.items():
            if owner == runtime.rank:
                layout = model[name_model_array(id.name)]
                m, n = layout.shape[-2:]
                self._kept[id] = SoapMatrix((m, n), config, getattr(torch, layout.dtype), device)

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        self._steps += 1
        gradients = ((p.name, [piece.tensor.grad for piece in p.pieces]) for p in self.matrices)
        mapped = self.runtime.map_matrices(self._update, gradients)  # type: ignore[arg-type]
        for parameter, (_, updates) in zip(self.matrices, mapped, strict=True):
            rate = learning_rate * choose_by_pattern(self.config.lr_multipliers, parameter.name, 1.0)
            decay = get_decay(parameter, self.config)
            if self._steps == 1:
                continue
            for piece, update in zip(parameter.pieces, updates, strict=True):
                piece.tensor.mul_(1 - rate * decay)
                piece.tensor.add_(update, alpha=-rate)
        self._rest.step(learning_rate)

    def _update(self, gradient: Tensor, id: MatrixId) -> Tensor:
        matrix = self._kept[id]
        return matrix.update(gradient.to(matrix.mean.device), self._steps).to(gradient.device)

    def shards(self) -> Iterator[Shard]:
        for id, matrix in self._kept.items():
            for state, x in matrix.iterate_arrays():
                name = name_array(state, id, self.runtime.registry)
                yield Shard(name, tuple(x.shape), x.dtype, (0,) * x.dim(), x)
        yield from self._rest.shards()

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps}

    def load_state(self, state: dict[str, Any]) -> None:
        self._steps = int(state["steps"])
        self._rest.load_state(state)


def build_registry(config: Soap, model: Registry, owners: Mapping[MatrixId, int]) -> Registry:
    """Return the registry of the matrices' state: unsharded, on the rank that maps the matrix."""
    layouts = {}
    for id, owner in owners.items():
        at, dtype = tuple(model.mesh.coordinate(owner).items()), model[name_model_array(id.name)].dtype
        m, n = model[name_model_array(id.name)].shape[-2:]
        shapes = {"exp_avg": (m, n), "exp_avg_sq": (m, n)}
        for side, length in (("left", m), ("right", n)):
            if length <= config.max_precond_dim:
                shapes |= {side: (length, length), f"{side}_basis": (length, length)}
        for state, shape in shapes.items():
            layouts[name_array(state, id, model)] = Layout(shape, dtype, at=at)
    return Registry(model.mesh, layouts)


def name_array(state: str, id: MatrixId, model: Registry) -> str:
    """Return optimizer/<state>/<parameter>, and for a stack of matrices also the number of the matrix."""
    stacked = len(model[name_model_array(id.name)].shape) > 2
    return f"optimizer/{state}/{id.name}.{id.number}" if stacked else f"optimizer/{state}/{id.name}"


def build(config: Soap, run: Run, runtime: Runtime) -> SoapOptimizer:
    """Return the optimizer `soap`: SOAP for matrices and stacks in the blocks of the plan, AdamW for all others."""
    return SoapOptimizer(config, runtime, list_block_matrices(run, runtime), run.deterministic)
