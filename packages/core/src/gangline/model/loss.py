"""Cross-entropy that keeps little: no log-probabilities, one number a row beside the logits.

N rows (tokens), V vocabulary, D model width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1 << 25  # elements that are in float32 at a time: 128 MiB, however large the vocabulary


def logits(hidden: Tensor, weight_VD: Tensor) -> Tensor:
    """(..., D) -> (..., V), in the dtype of `hidden`."""
    return F.linear(hidden, weight_VD.to(hidden.dtype))


def loss(hidden_BTD: Tensor, weight_VD: Tensor, targets_BT: Tensor, loss_mask_BT: Tensor) -> Tensor:
    """Sum over the targets that count of -log p(target), 0-d, in nats. The default of the `loss` seam."""
    logits_NV = logits(hidden_BTD, weight_VD).flatten(0, 1)
    return _CrossEntropy.apply(logits_NV, targets_BT.flatten(), loss_mask_BT.flatten())


def _wide(x: Tensor) -> Tensor:
    """In float32; float64 stays."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _CrossEntropy(torch.autograd.Function):
    """log-sum-exp and exponentials in float32 (float64 for float64 logits), a few rows at a time.

    d loss / d logits = softmax(logits) - onehot(target), computed again from the logits and each row's log-sum-exp,
    where autograd would have kept a float32 copy of all log-probabilities.
    """

    @staticmethod
    def forward(ctx, logits_NV: Tensor, targets_N: Tensor, counts_N: Tensor) -> Tensor:
        targets_N1 = targets_N.masked_fill(~counts_N, 0)[:, None]  # any index will do where nothing counts
        lse_N1 = torch.cat([_wide(rows).logsumexp(-1, keepdim=True) for rows in logits_NV.split(_rows(logits_NV))])
        ctx.save_for_backward(logits_NV, targets_N1, counts_N, lse_N1)
        losses_N = (lse_N1 - _wide(logits_NV.gather(1, targets_N1))).squeeze(1)
        return losses_N.masked_fill(~counts_N, 0).sum()

    @staticmethod
    def backward(ctx, grad: Tensor):
        logits_NV, targets_N1, counts_N, lse_N1 = ctx.saved_tensors
        each_N1 = (counts_N.to(grad.dtype) * grad)[:, None]
        out_NV = torch.empty_like(logits_NV)
        pieces = (x.split(_rows(logits_NV)) for x in (logits_NV, targets_N1, each_N1, lse_N1, out_NV))
        for logits, targets, each, lse, out in zip(*pieces, strict=True):
            p = (_wide(logits) - lse).exp_()
            p.scatter_(1, targets, p.gather(1, targets) - 1)
            out.copy_(p.mul_(each))
        return out_NV, None, None


def _rows(logits_NV: Tensor) -> int:
    return max(1, CHUNK // logits_NV.shape[1])
