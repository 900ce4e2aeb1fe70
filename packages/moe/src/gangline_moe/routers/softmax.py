"""Softmax router (Shazeer et al., arXiv 1701.06538, section 2.1; Switch, arXiv 2101.03961, section 2.1).

With `renormalise` the chosen probabilities are divided by their sum, which is the softmax over the chosen experts only
(Mixtral, arXiv 2401.04088, section 2.1; Qwen3-MoE's `norm_topk_prob`).
"""

from __future__ import annotations

from torch import Tensor

from gangline_moe.nodes import SoftmaxNode
from gangline_moe.routers.base import Choice, Router, divide_by_sum


class SoftmaxRouter(Router):
    """Router with softmax scores; see `Router`."""

    node: SoftmaxNode

    def choose(self, logits_NE: Tensor) -> Choice:
        prob_NE = logits_NE.softmax(-1)
        expert_Nk = self.choose_top_k(prob_NE)
        weight_Nk = prob_NE.gather(1, expert_Nk)
        if self.node.renormalise:
            weight_Nk = divide_by_sum(weight_Nk)
        return Choice(expert_Nk, weight_Nk, prob_NE, logits_NE)
