"""Gated product of experts and its gradients: one kernel each way on a GPU, plain operators elsewhere."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline_basics.model.feed_forward import apply_gate, bound_gradients
from gangline_basics.model.gating import SWIGLU, Gating
from gangline_basics.model.kernels import takes_kernels


def join(gating: Gating, gate_AH: Tensor, up_AH: Tensor) -> Tensor:
    """Return the gated product that `gating` defines, (A, H). `gating` has the activation silu."""
    if gating != SWIGLU:
        return apply_gate(gating, gate_AH, up_AH)
    if takes_kernels(gate_AH):
        from gangline_moe import gated_triton

        return gated_triton.join(gate_AH, up_AH)
    return F.silu(gate_AH).mul_(up_AH)


def compute_gradients(gating: Gating, gate_AH: Tensor, up_AH: Tensor, dh_AH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `join(gating, gate_AH, up_AH)` and the gradients of gate and up, all (A, H), given the gradient `dh_AH` of
    the product, whose memory is overwritten.
    """
    if gating != SWIGLU:
        return apply_gate(gating, gate_AH, up_AH), *bound_gradients(gating, gate_AH, up_AH, dh_AH)
    if takes_kernels(gate_AH):
        from gangline_moe import gated_triton

        return gated_triton.compute_gradients(gate_AH, up_AH, dh_AH)
    active_AH = F.silu(gate_AH)
    joined_AH = active_AH * up_AH
    dup_AH = active_AH.mul_(dh_AH)
    return joined_AH, torch.ops.aten.silu_backward(dh_AH.mul_(up_AH), gate_AH), dup_AH
