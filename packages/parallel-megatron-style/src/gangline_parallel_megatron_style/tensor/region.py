"""Tensor-parallel region: a module whose first linears are sharded by outputs (colwise), the last by inputs (rowwise).

For example attention with its heads, or a feed-forward layer with its hidden features (arXiv 1909.08053, section 3).
W_i, A_i are the shards of the weights on tp rank i of n; x, y, dx, dy: this rank's tokens; X, dY: all tokens.

                    plain                             sequence parallel (arXiv 2205.05198, section 4.2.2)
    enter           X = x                             X = all-gather(x)                only x is saved
      backward      dx = all-reduce(Σ dY_i W_i)       dx = reduce-scatter(Σ dY_i W_i)
    column          Y_i = X W_iᵀ                      as plain; Σ runs over all matmuls of one x, in order of call
      backward      dW_i = dY_iᵀ X                    X is gathered again, once for all matmuls of one x
    row             P_i = X_i A_iᵀ                    as plain
      backward      dX_i = dY A_i, dA_i = dYᵀ X_i     as plain
    leave           y = all-reduce(P_i)               y = reduce-scatter(P_i)
      backward      dY = dy                           dY = all-gather(dy)

Communication is in `crossing`, matmuls in `matmuls`. Weights are hidden from autograd in tuples: their gradients are
computed while dx is in flight, or deferred in a zero-bubble schedule (`weight_grads`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gangline_parallel_megatron_style.tensor.crossing import Enter, Leave
from gangline_parallel_megatron_style.tensor.matmuls import Column, Row
from gangline_parallel_megatron_style.tensor.rows import from_rows, to_rows
from gangline_parallel_megatron_style.tensor.setting import Setting, make_anchor
from gangline_parallel_megatron_style.tensor.shared_input import SharedInput


@dataclass
class Region:
    """The sharded matmuls of one module. `columns`: number of colwise matmuls that are called on one input x.

    The first matmul on an x enters the region; the other matmuls find the entered tensor X by the identity of x. X is
    dropped after `columns` matmuls, when another x comes, and when the region is left. If X is dropped too
    early, the next matmul costs one more collective, and the result is the same.
    """

    setting: Setting
    columns: int = 1
    _open: tuple[Tensor, tuple[int, bool], SharedInput, Tensor] | None = field(default=None, repr=False)

    def multiply_colwise(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Map x (B, t, in), w (out / n, in), b (out / n,) to (B, T, out / n); with sequence parallelism T = n·t."""
        shared_input, x_ND = self._enter(x)
        y_NF = Column.apply(x_ND, None if x_ND.requires_grad else make_anchor(w, b), (w, b), shared_input)
        return from_rows(y_NF, x.shape, self.setting.sequence_parallel)

    def multiply_rowwise(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        """Map x (B, T, in / n), w (out, in / n), b (out,) to (B, t, out): the matmul summed over ranks, plus b once."""
        self._open = None
        partial_ND = Row.apply(x, None if x.requires_grad else make_anchor(w), (w, None), self.setting)
        y_ND = Leave.apply(partial_ND, None if partial_ND.requires_grad else make_anchor(b), (b,), self.setting)
        return from_rows(y_ND, x.shape, self.setting.sequence_parallel)

    def _enter(self, x: Tensor) -> tuple[SharedInput, Tensor]:
        key = (0 if x.is_inference() else x._version, torch.is_grad_enabled())
        if self._open is not None and self._open[0] is x and self._open[1] == key:
            _, _, shared_input, x_ND = self._open
        else:
            shared_input = SharedInput(self.setting)
            narrow = x.to(self.setting.precision.compute_dtype)
            x_ND = Enter.apply(to_rows(narrow, self.setting.sequence_parallel), shared_input)
        shared_input.matmul_count += 1
        self._open = None if shared_input.matmul_count == self.columns else (x, key, shared_input, x_ND)
        return shared_input, x_ND
