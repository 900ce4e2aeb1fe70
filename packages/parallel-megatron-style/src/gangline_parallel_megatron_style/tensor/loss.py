"""Cross-entropy over a vocabulary sharded over tp (arXiv 1909.08053, section 3): logits are never gathered.

Each rank reduces its part of a row of logits to two numbers: the log-sum-exp lse_i, and the target's logit target_i (0
if the target is on another rank), in float32 at least. The numbers of all ranks are gathered, and every rank merges
them:

    lse = log Σ_i exp(lse_i)        loss = lse - Σ_i target_i        d loss / d logits_i = exp(logits_i - lse) - onehot

The z-loss, Σ lse² over the tokens, has the gradient 2 lse exp(logits_i - lse); only rank 0 reports its value.

Memory is as in the loss of gangline-basics: this rank's logits and a few numbers per row are saved; exponentials are in
float32 for a few rows at a time. With chunks, logits are not saved either, and the weight's gradient is computed
together with the recomputed logits, never deferred. With sequence parallelism each rank saves the hidden state of its
own tokens, and the backward pass gathers the hidden state again.

N rows (tokens), V vocabulary of this rank, D model width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.model.calls import LossCall
from gangline.model.forward_context import emit_loss
from gangline.model.weight_grads import accumulate_grad, defer
from gangline_basics.model.loss import (
    cap_logits_,
    compute_by_chunks,
    compute_gradients_by_chunks,
    compute_logits_gradient,
    log_sum_exp,
    uncap_gradient_,
    widen,
)
from gangline_parallel_megatron_style.tensor.rows import to_rows
from gangline_parallel_megatron_style.tensor.setting import Setting, is_trained, make_anchor


@dataclass(frozen=True)
class VocabularyLoss:
    """Loss over a vocabulary shard.

    first  first vocabulary row of the shard's weight, which may have no rows
    chunk  number of tokens whose logits exist at a time, recomputed in the backward pass; None: all logits are saved
    """

    setting: Setting
    first: int
    computes: LossCall
    chunk: int | None = None

    def __call__(self, hidden_BTD: Tensor, w_VD: Tensor, targets_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Return the loss summed over all tokens, 0-d, equal on all ranks.

        hidden (B, t, D), w (V, D), targets and loss mask (B, T); t = T without sequence parallelism
        """
        tokens_first = self.setting.sequence_parallel
        targets_N, counts_N = ((x.t() if tokens_first else x).reshape(-1) for x in (targets_BT, loss_mask_BT))
        h_ND = to_rows(hidden_BTD, tokens_first)
        anchor = None if h_ND.requires_grad else make_anchor(w_VD)
        chunk = self.chunk if self.chunk is not None and self.chunk < len(targets_N) else None
        arguments = (targets_N - self.first, counts_N, self.setting, self.computes.soft_cap, chunk)
        loss, squares = _Loss.apply(h_ND, anchor, (w_VD,), *arguments)
        if not self.computes.z:
            return loss
        term = self.computes.z * squares
        if tokens_first and self.setting.comm.index:  # only rank 0 emits the value, all the gradient
            term = term - term.detach()
        return emit_loss(loss, term, "z_loss")


class _Loss(torch.autograd.Function):
    """Autograd function: hidden, targets -> (Σ (lse - logit of the target), Σ lse²) over the tokens, both 0-d.

    hidden   (N, D), or this rank's tokens of it with sequence parallelism
    targets  (N,) relative to this rank's first vocabulary row
    """

    @staticmethod
    def forward(
        ctx,
        h_ND,
        anchor,
        hidden: tuple[Tensor],
        targets_N: Tensor,
        counts_N: Tensor,
        setting: Setting,
        soft_cap: float | None,
        chunk: int | None,
    ):
        comm, (w,) = setting.comm, hidden
        all_ND = comm.all_gather(h_ND) if setting.sequence_parallel else h_ND
        here_N = counts_N & (targets_N >= 0) & (targets_N < w.shape[0])
        targets_N = targets_N.masked_fill(~here_N, 0)
        logits_NV = None
        if chunk is None or not len(w):
            logits_NV = F.linear(all_ND, w.to(h_ND.dtype))
            if soft_cap is not None:
                cap_logits_(logits_NV, soft_cap)
            part_2N = _reduce_logits(logits_NV, targets_N, here_N)
        else:
            lse_N, target_N = compute_by_chunks(all_ND, w.to(h_ND.dtype), targets_N, chunk, soft_cap)
            part_2N = torch.stack((lse_N, target_N.masked_fill(~here_N, 0)))
        lse_nN, target_nN = comm.all_gather(part_2N).view(comm.size, 2, -1).unbind(1)
        lse_N = lse_nN.logsumexp(0)
        ctx.setting, ctx.w, ctx.soft_cap, ctx.chunk = setting, w, soft_cap, chunk
        ctx.save_for_backward(h_ND, logits_NV, targets_N, here_N, counts_N, lse_N)
        ctx.set_materialize_grads(False)
        squares = lse_N.square().masked_fill(~counts_N, 0).sum()
        return (lse_N - target_nN.sum(0)).masked_fill(~counts_N, 0).sum(), squares

    @staticmethod
    def backward(ctx, grad: Tensor, grad_squares: Tensor | None):
        h_ND, logits_NV, targets_N, here_N, counts_N, lse_N = ctx.saved_tensors
        setting: Setting = ctx.setting
        w, comm = ctx.w, setting.comm
        gathers = setting.sequence_parallel and (is_trained(w) or ctx.chunk is not None)
        gathering = comm.start_all_gather(h_ND) if gathers else None
        z_N = None if grad_squares is None else 2 * lse_N * counts_N * grad_squares
        each_N = counts_N.to(grad.dtype) * grad
        start = comm.start_reduce_scatter if setting.sequence_parallel else comm.start_all_reduce
        travelling = None
        if ctx.chunk is not None and len(w):
            all_ND = h_ND if gathering is None else gathering.wait()
            arguments = (targets_N, here_N, each_N, lse_N, z_N, ctx.chunk, ctx.soft_cap)
            grad_flags = (ctx.needs_input_grad[0], is_trained(w))
            dh_ND, dw_VD = compute_gradients_by_chunks(all_ND, w.to(h_ND.dtype), *arguments, grad_flags)
            if dh_ND is not None:
                travelling = start(dh_ND)
            if dw_VD is not None:
                defer(lambda: accumulate_grad(w, dw_VD))
            return None if travelling is None else travelling.wait(), *(None,) * 7
        dlogits_NV = _compute_gradient(logits_NV, targets_N, here_N, each_N, lse_N, z_N)
        if ctx.soft_cap is not None:
            uncap_gradient_(dlogits_NV, logits_NV, ctx.soft_cap)
        if ctx.needs_input_grad[0]:
            travelling = start(dlogits_NV @ w.to(h_ND.dtype))
        all_ND = h_ND if gathering is None else gathering.wait()
        if is_trained(w):
            defer(lambda: accumulate_grad(w, dlogits_NV.t() @ all_ND))
        return None if travelling is None else travelling.wait(), *(None,) * 7


def _reduce_logits(logits_NV: Tensor, targets_N: Tensor, here_N: Tensor) -> Tensor:
    """Return (2, N): each row's log-sum-exp, and the target's logit if this rank has it, else 0.

    For an empty vocabulary shard the log-sum-exp is -inf and the logit 0.
    """
    if not logits_NV.shape[1]:
        empty_N = widen(logits_NV.new_zeros(logits_NV.shape[0]))
        return torch.stack((empty_N - torch.inf, empty_N))
    target_N = widen(logits_NV.gather(1, targets_N[:, None]).squeeze(1)).masked_fill(~here_N, 0)
    return torch.stack((log_sum_exp(logits_NV), target_N))


def _compute_gradient(
    logits_NV: Tensor, targets_N: Tensor, here_N: Tensor, each_N: Tensor, lse_N: Tensor, z_N: Tensor | None
) -> Tensor:
    """Compute the gradient of the logits (`compute_logits_gradient`), also for an empty vocabulary shard."""
    if not logits_NV.shape[1]:
        return torch.empty_like(logits_NV)
    return compute_logits_gradient(logits_NV, targets_N, here_N, each_N, lse_N, z_N)
