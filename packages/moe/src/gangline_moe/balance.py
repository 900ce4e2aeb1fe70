"""Losses that even the load of the experts, and the metrics that a layer with experts emits.

All are means over tokens: a term is the sum over this rank's own tokens, which the strategy divides by the step's
token count.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.forward_context import emit_loss, emit_metric, over_sequence
from gangline_moe.routers.base import Choice, Router


def balanced(hidden_BTD: Tensor, router: Router, choice: Choice, load_E: Tensor) -> Tensor:
    """`hidden_BTD`, whose backward pass now adds the router's losses; emits them, the load and the entropy.

    load_E: how many (token, expert) pairs each expert got on this rank, before any is dropped.
    """
    node = router.node
    if router.training:
        if node.sequence_loss:
            term = node.sequence_loss * sequence_loss(choice, hidden_BTD.shape[0])
            hidden_BTD = emit_loss(hidden_BTD, term, "sequence_loss")
        if node.step_loss and router.share is not None:
            term = node.step_loss * step_loss(choice.prob_NE, router.share)
            hidden_BTD = emit_loss(hidden_BTD, term, "step_loss")
        if node.z_loss:
            hidden_BTD = emit_loss(hidden_BTD, node.z_loss * z_loss(choice.logits_NE), "z_loss")
    emit_metric("load", load_E, "sum")
    emit_metric("entropy", entropy(choice.prob_NE.detach()).mean(), "mean")
    return hidden_BTD


def sequence_loss(choice: Choice, sequences: int) -> Tensor:
    """Σ over sequences of t · Σ_i f_i P_i, t being the sequence's tokens on this rank.

    f_i = E / (k T) · how often the sequence's T tokens chose expert i, P_i = its mean probability in the sequence
    (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). Both are of the whole sequence, a part of which this rank has.
    """
    E, k = choice.prob_NE.shape[1], choice.expert_Nk.shape[1]
    prob_BTE = choice.prob_NE.view(sequences, -1, E)
    own = prob_BTE.shape[1]
    chosen_BE = prob_BTE.new_zeros(sequences, E + 1)
    chosen_BE.scatter_add_(1, choice.expert_Nk.view(sequences, -1), prob_BTE.new_ones(()).expand(sequences, own * k))
    parts = torch.cat((chosen_BE[:, :E], prob_BTE.sum(1), prob_BTE.new_full((sequences, 1), own)), 1)
    whole = over_sequence(parts)
    T = whole[:, -1:].detach()
    f_BE, p_BE = whole[:, :E].detach() * E / (k * T), whole[:, E : 2 * E] / T
    return own * (f_BE * p_BE).sum()


def step_loss(prob_NE: Tensor, share_E: Tensor) -> Tensor:
    """Σ over tokens of E · Σ_i f_i p_i: the loss of Switch (arXiv 2101.03961, equations 4 to 6), whose shares f are of
    the whole batch, here of the last step's: this step's are known only when all of its microbatches are through."""
    return prob_NE.shape[1] * (prob_NE @ share_E.to(prob_NE)).sum()


def z_loss(logits_NE: Tensor) -> Tensor:
    """Σ over tokens of (log Σ_i exp logit_i)² (ST-MoE, arXiv 2202.08906, equation 5)."""
    return logits_NE.logsumexp(-1).square().sum()


def entropy(prob_NE: Tensor) -> Tensor:
    """Of each token's probabilities, in nats, (N,)."""
    return torch.special.entr(prob_NE).sum(-1)
