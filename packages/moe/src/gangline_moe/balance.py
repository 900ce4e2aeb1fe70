"""Load-balancing losses of experts, and the metrics of an MoE layer.

Losses are means over the tokens in the loss mask: a rank sums the loss over its tokens, and the strategy divides by the
step's token count. Padding and masked-out prompts therefore have no weight. The load, from which the bias and the next
step's load shares are updated, counts all tokens except padding, because experts compute prompts too. Other metrics
count all tokens.

B sequences of T tokens, N = B·T, E experts, k experts per token
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.model.forward_context import emit_loss, emit_metric, get_loss_mask, get_padding, sum_over_sequence
from gangline.model.untraced import untraced
from gangline_moe.routers.base import Choice, Router


def apply_balance(hidden_BTD: Tensor, router: Router, choice: Choice, load_E: Tensor) -> Tensor:
    """Return `hidden_BTD`, with the router's losses in its backward pass; emit losses, load and entropy.

    load_E: number of (token, expert) pairs per expert on this rank, padding included, before drops over capacity.
    """
    node = router.node
    terms: dict[str, Tensor] = {}
    if router.training and node.emits_loss():
        counts_BT = get_loss_mask(hidden_BTD)
        counts_N = counts_BT.reshape(-1)
        if node.seq_aux_loss:
            terms["seq_aux_loss"] = node.seq_aux_loss * compute_sequence_loss(choice, counts_BT)
        if node.global_aux_loss and router.share is not None:
            terms["global_aux_loss"] = node.global_aux_loss * compute_step_loss(choice.prob_NE, router.share, counts_N)
        if node.z_loss:
            terms["z_loss"] = node.z_loss * compute_z_loss(choice.logits_NE, counts_N)
    return _emit(hidden_BTD, terms, drop_padding(load_E, choice), compute_entropy(choice.prob_NE.detach()).mean())


@untraced  # all at once: one break of a compiled block's graph
def _emit(hidden_BTD: Tensor, terms: dict[str, Tensor], load_E: Tensor, entropy: Tensor) -> Tensor:
    for name, term in terms.items():
        hidden_BTD = emit_loss(hidden_BTD, term, name)
    emit_metric("load", load_E, "sum")
    emit_metric("entropy", entropy, "mean")
    return hidden_BTD


def drop_padding(load_E: Tensor, choice: Choice) -> Tensor:
    """Return the load without padding tokens, shape (E,)."""
    if (padding_BT := get_padding()) is None:
        return load_E
    own_N = (~padding_BT).reshape(-1).to(load_E.dtype)
    counts = load_E.new_zeros(len(load_E) + 1)  # the last entry: pairs without an expert
    counts.scatter_add_(0, choice.expert_Nk.flatten(), own_N.repeat_interleave(choice.expert_Nk.shape[1]))
    return counts[:-1]


def compute_sequence_loss(choice: Choice, counts_BT: Tensor) -> Tensor:
    """Return Σ over sequences of t · Σ_i f_i P_i, t being the number of the sequence's loss tokens on this rank.

    f_i = E / (k T) · number of times that the sequence's T loss tokens chose expert i, P_i = mean probability of
    expert i over these T tokens (DeepSeek-V3, arXiv 2412.19437, equations 17 to 20). f_i and P_i cover the full
    sequence, even if it is sharded over ranks. Loss tokens: tokens in the loss mask.
    """
    E, k = choice.prob_NE.shape[1], choice.expert_Nk.shape[1]
    B = len(counts_BT)
    prob_BTE = choice.prob_NE.view(B, -1, E)
    weight_BT = counts_BT.to(prob_BTE.dtype)
    chosen_BE = prob_BTE.new_zeros(B, E + 1)
    chosen_BE.scatter_add_(1, choice.expert_Nk.view(B, -1), weight_BT.repeat_interleave(k, 1))
    own_B1 = weight_BT.sum(1, keepdim=True)
    whole = sum_over_sequence(torch.cat((chosen_BE[:, :E], (prob_BTE * weight_BT[..., None]).sum(1), own_B1), 1))
    T_B1 = whole[:, -1:].detach().clamp_min(1)
    f_BE, p_BE = whole[:, :E].detach() * E / (k * T_B1), whole[:, E : 2 * E] / T_B1
    return (own_B1 * f_BE * p_BE).sum()


def compute_step_loss(prob_NE: Tensor, share_E: Tensor, counts_N: Tensor) -> Tensor:
    """Return Σ over tokens of E · Σ_i f_i p_i, the loss of Switch (arXiv 2101.03961, equations 4 to 6).

    f_i is the load share of expert i in the previous step's global batch: the shares of the current step are known
    only after all its microbatches.
    """
    return prob_NE.shape[1] * (prob_NE @ share_E.to(prob_NE) * counts_N).sum()


def compute_z_loss(logits_NE: Tensor, counts_N: Tensor) -> Tensor:
    """Return Σ over tokens of (log Σ_i exp logit_i)² (ST-MoE, arXiv 2202.08906, equation 5)."""
    return (logits_NE.logsumexp(-1).square() * counts_N).sum()


def compute_entropy(prob_NE: Tensor) -> Tensor:
    """Return the entropy of each token's expert probabilities in nats, shape (N,)."""
    return torch.special.entr(prob_NE).sum(-1)
