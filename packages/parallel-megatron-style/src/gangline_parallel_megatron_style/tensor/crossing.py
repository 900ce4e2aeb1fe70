"""Entry and exit of a tensor-parallel region, with all communication of the region. The formulas are in `region`."""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.comm.base import Pending
from gangline.model.weight_grads import accumulate_grad, defer
from gangline_parallel_megatron_style.tensor.setting import Setting, is_trained
from gangline_parallel_megatron_style.tensor.shared_input import SharedInput, compute_input_gradient


class Enter(torch.autograd.Function):
    """Autograd function x (B·t, D) -> X (N, D): from this rank's rows to the input rows of the region's matmuls."""

    @staticmethod
    def forward(ctx, x_ND: Tensor, shared_input: SharedInput) -> Tensor:
        ctx.shared_input = shared_input
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x_ND)
        if shared_input.setting.sequence_parallel:
            return shared_input.setting.comm.all_gather(x_ND)
        return x_ND.view_as(x_ND)

    @staticmethod
    def backward(ctx, _: None):
        """Reduce dx over tp, and meanwhile compute each dW, from the dY that the matmuls stored in the shared input.

        X is gathered while Σ dY_i W_i is computed, so that deferred weight gradients do not wait for other ranks.
        """
        setting: Setting = ctx.shared_input.setting
        comm, sequence_parallel = setting.comm, setting.sequence_parallel
        pending = ctx.shared_input.take()
        if not pending:
            return None, None
        (own_ND,) = ctx.saved_tensors
        gathering: Pending[Tensor] | None = None
        if sequence_parallel and any(is_trained(matmul.w) for matmul in pending):
            gathering = comm.start_all_gather(own_ND)
        start = comm.start_reduce_scatter if sequence_parallel else comm.start_all_reduce
        travelling = start(compute_input_gradient(setting, pending))

        def accumulate_weight_grads() -> None:
            x_ND = own_ND if gathering is None else gathering.wait()
            for matmul in pending:
                matmul.accumulate(setting, x_ND)

        if any(matmul.wanted for matmul in pending):
            defer(accumulate_weight_grads)
        return travelling.wait(), None


class Leave(torch.autograd.Function):
    """Autograd function: partial sums P (N, D) of this rank -> sum over tp y (B·t, D), plus the bias b (D,) once.

    Saves no tensors. It is separate from the matmul, so that all saved tensors exist before the collective: a
    recomputed block ends without its last collective, because torch.utils.checkpoint stops once all saved tensors are
    recomputed.
    """

    @staticmethod
    def forward(ctx, partial_ND: Tensor, _: Tensor | None, hidden: tuple[Tensor | None], setting: Setting) -> Tensor:
        ctx.setting, (ctx.b,) = setting, hidden
        if setting.sequence_parallel:
            y_ND = setting.comm.reduce_scatter(partial_ND)
        else:  # in place, because no other function reads the matmul's output
            y_ND = setting.comm.all_reduce(partial_ND)
            ctx.mark_dirty(partial_ND)
        if ctx.b is not None:
            y_ND += ctx.b
        return y_ND

    @staticmethod
    def backward(ctx, dy_ND: Tensor):
        setting, b = ctx.setting, ctx.b
        if is_trained(b):
            defer(lambda: accumulate_grad(b, dy_ND.sum(0)))
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        return (setting.comm.all_gather(dy_ND.contiguous()) if setting.sequence_parallel else dy_ND), None, None, None
