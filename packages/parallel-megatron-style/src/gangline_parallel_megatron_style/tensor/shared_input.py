"""One input x of a tensor-parallel region, and the backward passes of the matmuls that were called on x."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gangline.model.weight_grads import accumulate_grad
from gangline_parallel_megatron_style.tensor.setting import Setting, is_trained


@dataclass
class PendingMatmul:
    """A matmul whose weight gradients are still to compute: its position in call order, dY (N, F), weight and bias."""

    order: int
    dy_NF: Tensor
    w: Tensor
    b: Tensor | None

    @property
    def wanted(self) -> bool:
        return is_trained(self.w) or is_trained(self.b)

    def accumulate(self, setting: Setting, x_ND: Tensor) -> None:
        """Compute and accumulate the gradients of the weight and of the bias, if trained, from the input X (N, D)."""
        if is_trained(self.w):
            accumulate_grad(self.w, setting.precision.compute_grad_w(self.dy_NF, x_ND))
        if self.b is not None and is_trained(self.b):
            accumulate_grad(self.b, self.dy_NF.sum(0))


class SharedInput:
    """Counter of the matmuls called on one input x, and collector of their dY in the backward pass.

    It has no reference to activations: autograd saves the tensors for the backward pass, so that recomputation can free
    them.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.matmul_count = 0
        self.pending: list[PendingMatmul] = []

    def take(self) -> list[PendingMatmul]:
        """Return the collected matmuls, in order of call, and clear them, because a graph may run backward again."""
        matmuls, self.pending = self.pending, []
        return sorted(matmuls, key=lambda left: left.order)


def compute_input_gradient(setting: Setting, pending: list[PendingMatmul]) -> Tensor:
    """Return Σ dY_i W_i over the matmuls of one x, (N, D): this rank's part of the sum over the ranks."""
    first, *others = pending
    dx_ND = setting.precision.compute_grad_x(first.dy_NF, first.w)
    for matmul in others:
        dx_ND += setting.precision.compute_grad_x(matmul.dy_NF, matmul.w)
    return dx_ND
