"""The precision: contract for dtypes, the matmul of linear layers, and the loss scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Precision(ABC):
    """Contract of a precision: dtypes, and the matmul of linears. Strategies store and cast; no module is wrapped."""

    param_dtype: torch.dtype  # dtype of master weights and optimizer state
    compute_dtype: torch.dtype  # dtype of activations, and of the copies of the weights that the forward pass reads
    reduce_dtype: torch.dtype  # dtype of gradients in reductions between ranks
    grad_dtype: torch.dtype  # dtype in which gradients are accumulated and passed to the optimizer

    @abstractmethod
    def linear(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """Return x (..., in) times w (out, in) transposed, plus b (out,); plain and tensor-parallel layers call it.

        A module with matmuls that is not a `Linear` has a method `set_precision(precision)`, called once before its
        first matmul. The module's own autograd Functions may call `linear` as a bare matmul in the forward pass, and
        `compute_grad_x` and `compute_grad_w` in the backward pass.
        """

    def compute_grad_x(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return the gradient of `linear` with respect to x: dy (..., out) times w (out, in), in the compute dtype.

        For strategies that compute the gradients of x and w at different times. A precision whose `linear` is more than
        a matmul in `compute_dtype` must override both `compute_grad_x` and `compute_grad_w`.
        """
        return dy.to(self.compute_dtype) @ w

    def compute_grad_w(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the gradient with respect to w, (out, in), summed over leading dims of dy (..., out), x (..., in)."""
        return dy.flatten(0, -2).to(self.compute_dtype).t() @ x.flatten(0, -2).to(self.compute_dtype)

    @property
    def scale(self) -> float:
        """Loss scale: factor of the loss before the backward pass; 1 unless `PrecisionConfig.finds_scale`."""
        return 1.0

    def update(self, found_inf: bool) -> None:
        """Update the loss scale after a step. found_inf: loss or gradients were not finite, equal on all ranks."""

    def state(self) -> dict[str, Any]:
        """Return the precision's state as JSON for the checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
