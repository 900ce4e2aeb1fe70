"""Cross-entropy that keeps little: no log-probabilities, one number a row beside the logits.

N rows (tokens), V vocabulary, D model width
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.inside import emit_loss
from gangline.model.calls import LossCall

CHUNK = 1 << 25  # elements that are in float32 at a time: 128 MiB, however large the vocabulary


def logits(hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """(..., D) -> (..., V), in the dtype of `hidden`."""
    return F.linear(hidden, weight_VD.to(hidden.dtype))


PLAIN = LossCall()


@dataclass(frozen=True)
class CrossEntropy:
    """The default of the `loss` seam."""

    computes: LossCall = PLAIN

    def __call__(self, hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
        """Sum over the targets that count of -log p(target), 0-d, in nats; the z-term of them is emitted."""
        logits_NV = logits(hidden_BTD, weight_VD).flatten(0, 1)
        loss, squares = _CrossEntropy.apply(logits_NV, targets_BT.flatten(), loss_mask_BT.flatten())
        return emit_loss(loss, self.computes.z * squares, "z_loss") if self.computes.z else loss


loss = CrossEntropy()


def _wide(x: Tensor) -> Tensor:
    """In float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _CrossEntropy(torch.autograd.Function):
    """(Σ lse - logit of the target, Σ lse²), both 0-d, lse the log-sum-exp of a row.

    Log-sum-exp and exponentials are in float32 (float64 for float64 logits), a few rows at a time. With p the softmax

        d Σ(lse - target) / d logits = p - onehot(target)      d Σ lse² / d logits = 2 lse p

    p is computed again from the logits and each row's log-sum-exp, where autograd would have kept a float32 copy of all
    log-probabilities.
    """

    @staticmethod
    def forward(ctx, logits_NV: Tensor, targets_N: Tensor, counts_N: Tensor) -> tuple[Tensor, Tensor]:
        targets_N1 = targets_N.masked_fill(~counts_N, 0)[:, None]  # any index will do where nothing counts
        lse_N1 = torch.cat([_wide(rows).logsumexp(-1, keepdim=True) for rows in logits_NV.split(_rows(logits_NV))])
        ctx.save_for_backward(logits_NV, targets_N1, counts_N, lse_N1)
        losses_N = (lse_N1 - _wide(logits_NV.gather(1, targets_N1))).squeeze(1)
        squares = lse_N1.squeeze(1).square().masked_fill(~counts_N, 0).sum()
        ctx.set_materialize_grads(False)
        return losses_N.masked_fill(~counts_N, 0).sum(), squares

    @staticmethod
    def backward(ctx, grad: Tensor, grad_squares: Tensor | None):
        logits_NV, targets_N1, counts_N, lse_N1 = ctx.saved_tensors
        each_N1 = (counts_N.to(grad.dtype) * grad)[:, None]
        z_N1 = None if grad_squares is None else 2 * lse_N1 * counts_N[:, None] * grad_squares
        out_NV = torch.empty_like(logits_NV)
        rows = _rows(logits_NV)
        pieces = (x.split(rows) for x in (logits_NV, targets_N1, each_N1, lse_N1, out_NV))
        for index, (logits, targets, each, lse, out) in enumerate(zip(*pieces, strict=True)):
            p = (_wide(logits) - lse).exp_()
            more = None if z_N1 is None else p * z_N1[index * rows : (index + 1) * rows]
            p.scatter_(1, targets, p.gather(1, targets) - 1)
            p.mul_(each)
            out.copy_(p if more is None else p.add_(more))
        return out_NV, None, None


def _rows(logits_NV: Tensor) -> int:
    return max(1, CHUNK // logits_NV.shape[1])
