"""Sampling of one token from each row of logits: a function of (seed, number of the text, step), in float64 on the CPU.

B batch, V vocabulary
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline.draws import draw_uniforms
from gangline.errors import UserError
from gangline.runtime import Sampling


def draw(logits_BV: Tensor, sampling: Sampling, numbers_B: Tensor, step: int) -> list[int]:
    """Draw the token of each row. numbers_B: int64, index of each row's text; step: number of tokens generated so far.

    Raises UserError if a logit or a probability is not a number.
    """
    logits_BV = logits_BV.detach().cpu()
    if logits_BV.amax(-1).isnan().any():
        raise UserError("the logits of the model contain NaN.", "Weights or activations of the model are not finite.")
    if sampling.temperature == 0:
        return logits_BV.numpy().argmax(-1).tolist()  # on a CPU, ten times as fast as argmax of torch
    logits_BV = logits_BV.double()
    p_BV = _compute_probabilities(logits_BV / sampling.temperature, sampling)
    if p_BV.isnan().any():  # a logit is infinite, or becomes infinite by division by a small temperature
        raise UserError(
            f"the token probabilities at temperature {sampling.temperature:g} contain NaN.",
            "A logit of the model is infinite, or overflows to infinity when it is divided by the temperature.",
            "Sample with temperature 0, which selects the likeliest token without this division.",
        )
    up_to_BV = p_BV.cumsum(-1)
    place_B1 = draw_uniforms(sampling.seed, step, numbers_B, "token").double()[:, None] * up_to_BV[:, -1:]
    # Take the first token whose cumulative probability is above the drawn number, so never a token of probability 0.
    return torch.searchsorted(up_to_BV, place_B1, right=True).squeeze(1).clamp_(max=p_BV.shape[1] - 1).tolist()


def _compute_probabilities(logits_BV: Tensor, sampling: Sampling) -> Tensor:
    """Compute the probabilities after top-k and top-p, 0 for excluded tokens. Ties with the k-th token are kept."""
    if sampling.top_k is not None and sampling.top_k < logits_BV.shape[1]:
        least_B1 = logits_BV.topk(sampling.top_k).values[:, -1:]
        logits_BV = logits_BV.masked_fill(logits_BV < least_B1, -torch.inf)
    p_BV = logits_BV.softmax(-1)
    if sampling.top_p is None or sampling.top_p == 1:
        return p_BV
    sorted_BV, order_BV = p_BV.sort(descending=True, stable=True)
    # tokens whose more likely tokens together already reach top_p
    beyond_BV = sorted_BV.cumsum(-1) - sorted_BV >= sampling.top_p
    return p_BV.masked_fill(torch.zeros_like(beyond_BV).scatter_(1, order_BV, beyond_BV), 0.0)
