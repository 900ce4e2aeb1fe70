"""The precision: contract for dtypes, the matmul of linear layers, and the loss scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Precision(ABC):
    """Contract of a precision: dtypes and the linear matmul. The strategy stores and casts; no module is wrapped.

    param_dtype    master weights and optimizer state
    compute_dtype  activations, and the copies of the weights that the forward pass reads
    reduce_dtype   gradients as ranks exchange them
    grad_dtype     gradients as they accumulate and as the optimizer sees them
    """

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype

    @abstractmethod
    def linear(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """Return x (..., in) times w (out, in) transposed, plus b (out,); plain and tensor-parallel layers call it.

        A module with matmuls other than a `Linear` has `multiply_by(precision)`, called once before its first matmul.
        In an autograd Function of its own it may call `linear` as a bare matmul in the forward pass, and
        `compute_grad_x` and `compute_grad_w` in the backward pass.
        """

    def compute_grad_x(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """Return the derivative of `linear` by x: dy (..., out) times w (out, in), in the compute dtype.

        For a strategy that runs the two halves of a backward pass at different times. A precision whose `linear` is
        more than a matmul in `compute_dtype` overrides both halves.
        """
        return dy.to(self.compute_dtype) @ w

    def compute_grad_w(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Return the derivative of `linear` by w, (out, in), summed over leading dims of dy (..., out), x (..., in)."""
        return dy.flatten(0, -2).to(self.compute_dtype).t() @ x.flatten(0, -2).to(self.compute_dtype)

    @property
    def scale(self) -> float:
        """Factor of the loss before the backward pass; 1 unless `PrecisionConfig.finds_scale`."""
        return 1.0

    def update(self, found_inf: bool) -> None:
        """Update the loss scale after a step. found_inf: whether the step was not finite; equal on all ranks."""

    def state(self) -> dict[str, Any]:
        """Return the precision's state as JSON for the checkpoint."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the state that `state` returned."""
