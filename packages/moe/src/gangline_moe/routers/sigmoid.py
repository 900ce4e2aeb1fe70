"""Sigmoid router with auxiliary-loss-free balancing by a bias (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

The bias affects only the choice; the weights are the chosen scores, divided by their sum and scaled. After each step
the bias of an expert increases by `bias_rate` if its load is below the mean, and decreases by it if above.
"""

from __future__ import annotations

from torch import Tensor

from gangline_moe.nodes import SigmoidNode
from gangline_moe.routers.base import Choice, Router, divide_by_sum


class SigmoidRouter(Router):
    """Router with sigmoid scores; see `Router`."""

    node: SigmoidNode

    def choose(self, logits_NE: Tensor) -> Choice:
        score_NE = logits_NE.sigmoid()
        return weigh_choice(self.node, logits_NE, score_NE, self.choose_top_k(score_NE))


def weigh_choice(node: SigmoidNode, logits_NE: Tensor, score_NE: Tensor, expert_Nk: Tensor) -> Choice:
    """Return the choice, weighted by scores: divided by their sum if `node.renormalise`, times `node.scale`."""
    weight_Nk = score_NE.gather(1, expert_Nk)
    if node.renormalise:
        weight_Nk = divide_by_sum(weight_Nk, 1e-20)
    prob_NE = score_NE / (score_NE.sum(-1, keepdim=True) + 1e-20)
    return Choice(expert_Nk, weight_Nk * node.scale, prob_NE, logits_NE)
