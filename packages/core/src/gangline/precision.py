"""The precision contract: dtypes, the product that linear layers use, and the loss scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class Precision(ABC):
    """Names dtypes and multiplies; the strategy owns storage and casts, and no module is wrapped.

    param_dtype    master weights and optimizer state
    compute_dtype  activations, and the copies of the weights that the forward pass reads
    reduce_dtype   gradients on the wire between ranks
    grad_dtype     gradients as they accumulate and as the optimizer sees them
    """

    param_dtype: torch.dtype
    compute_dtype: torch.dtype
    reduce_dtype: torch.dtype
    grad_dtype: torch.dtype

    @abstractmethod
    def linear(self, x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        """x (..., in) times w (out, in) transposed, plus b (out,): plain and tensor-parallel layers both use it.

        A module whose products are not those of a `Linear` has `multiply_by(precision)`, called once before the first
        of them; without a gradient it may call `linear` as a bare product, and the two below in its backward pass.
        """

    def compute_grad_x(self, dy: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """The derivative of `linear` by x: dy (..., out) times w (out, in), in the compute dtype.

        For a strategy that runs the two halves of a backward pass at different times. A precision whose `linear` is
        more than a product in `compute_dtype` overrides both halves.
        """
        return dy.to(self.compute_dtype) @ w

    def compute_grad_w(self, dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """The derivative of `linear` by w: (out, in), summed over the leading dims of dy (..., out) and x (..., in)."""
        return dy.flatten(0, -2).to(self.compute_dtype).t() @ x.flatten(0, -2).to(self.compute_dtype)

    @property
    def scale(self) -> float:
        """What the loss is multiplied by before the backward pass; 1 unless `PrecisionConfig.finds_scale`."""
        return 1.0

    def update(self, found_inf: bool) -> None:
        """Told after each step whether it was not finite; the same on all ranks."""

    def state(self) -> dict[str, Any]:
        """JSON that a checkpoint keeps."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
