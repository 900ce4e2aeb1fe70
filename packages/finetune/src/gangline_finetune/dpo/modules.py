"""DPO loss over pairs of answers (arXiv 2305.18290, equation 7).

B batch, T tokens, D model width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from gangline.batch import Batch
from gangline.model.build import Wrapper
from gangline.model.forward_context import emit_metric, sum_over_sequence
from gangline_finetune.dpo.nodes import DpoHeadNode

ROUNDING = 256  # assumed relative rounding error of an answer's log-likelihood, in machine epsilons


def compute_dpo_losses(now_B2: Tensor, first_B2: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Return losses (B,) and margins (B,): beta · (gain of the chosen answer - gain of the rejected answer).

    now_B2, first_B2: log-likelihoods of (chosen, rejected) by the trained model and by the reference model; a gain is
    their difference.
    """
    gained_B2 = now_B2 - first_B2
    margin_B = beta * (gained_B2[:, 0] - gained_B2[:, 1])
    return -F.logsigmoid(margin_B), margin_B


def mark_won_pairs(now_B2: Tensor, margin_B: Tensor, beta: float) -> Tensor:
    """Return (B,) bool: whether the chosen answer has gained more than the rejected one, beyond rounding errors.

    In the first step both models are equal, so margins are rounding errors, which differ between layouts.
    """
    rounding = ROUNDING * torch.finfo(now_B2.dtype).eps
    return margin_B > beta * rounding * now_B2.abs().sum(1)


def _select_side(batch: Batch, side: int) -> Batch:
    """Return the batch with the loss mask limited to document `side`."""
    return replace(batch, loss_mask=batch.loss_mask & (batch.document == side))


class DpoHead(Wrapper):
    """Head with DPO loss: hidden states (B, T, D) of rows of pairs -> the sum of the pairs' losses.

    Batches without `dpo_first` have the loss of the wrapped head. With `dpo_apart` the result is the losses of both
    sides, (2,), so that the reference model runs once per pair. If sequences are sharded, each rank computes the
    log-likelihoods of its tokens, and their sum over the ranks is equal on all ranks. Only the rank with a pair's
    single loss target reports the pair's loss and metrics.
    """

    weight: Tensor  # weight of the wrapped head
    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    normalise: Callable[[Tensor], Tensor]

    def wrap(self, node: DpoHeadNode) -> None:
        self.beta = node.beta

    def forward(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        if "dpo_apart" in batch.extra:
            return torch.stack([super(DpoHead, self).forward(hidden_BTD, _select_side(batch, side)) for side in (0, 1)])
        if "dpo_first" not in batch.extra:
            return super().forward(hidden_BTD, batch)
        now_B2, often = self.compute_log_likelihoods(self.normalise(hidden_BTD), batch)
        losses_B, margin_B = compute_dpo_losses(now_B2, batch.extra["dpo_first"].to(now_B2.dtype), self.beta)
        mine_B = batch.loss_mask.any(1).to(losses_B.dtype)
        for name, of_each_B in (
            ("pairs", 1.0),
            ("won", mark_won_pairs(now_B2, margin_B, self.beta)),
            ("margin", margin_B),
        ):
            emit_metric(f"dpo_{name}", (mine_B * of_each_B).sum() / often)
        return (losses_B * mine_B).sum()

    def compute_log_likelihoods(self, x_BTD: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (log-likelihoods of both sides' answers per row, (B, 2); number of ranks with the same tokens)."""
        assert batch.document is not None, "pairs are documents"
        log_likelihoods = []
        for b in range(len(batch.tokens)):
            row = slice(b, b + 1)
            position, document = batch.position[row], batch.document[row]
            for side, spans in enumerate(batch.extra["dpo_answers"][b]):
                start, stop = spans.unbind(1)  # one span per answer of the side
                within = (position[..., None] >= start) & (position[..., None] < stop)
                counts = (document == side) & within.any(-1)
                log_likelihoods.append(-self._compute_loss(x_BTD[row], batch.targets[row], counts))
        here_2B = torch.stack(log_likelihoods)
        # Several ranks may hold the same tokens, each token on equally many ranks: the total number of tokens on all
        # ranks divided by the row's length.
        every = sum_over_sequence(torch.cat((here_2B, torch.ones_like(here_2B[:1]))))
        often = (every[-1] * batch.tokens.shape[1] / batch.extra["dpo_length"][0]).detach()
        return (every[:-1] / often).view(-1, 2), often

    def _compute_loss(self, x_1TD: Tensor, targets_1T: Tensor, counts_1T: Tensor) -> Tensor:
        """Return the loss summed over the targets in `counts_1T`.

        If x has one token per target, logits are computed only for the targets in `counts_1T`. Under sequence
        parallelism x is sharded, and logits are computed for all targets.
        """
        if x_1TD.shape[1] == targets_1T.shape[1]:
            x_1TD, targets_1T, counts_1T = (
                x_1TD[counts_1T][None],
                targets_1T[counts_1T][None],
                counts_1T[counts_1T][None],
            )
        return self.loss(x_1TD, self.weight, targets_1T, counts_1T)
