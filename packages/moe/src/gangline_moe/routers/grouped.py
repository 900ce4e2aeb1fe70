"""Grouped router: group-limited choice (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, "node-limited routing").

The score of a group of consecutive experts is the sum of its two largest scores, biases included; a token's experts
come from the best `top_groups` groups, so that its rows go to few nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline_moe.nodes import GroupedNode
from gangline_moe.routers.base import Choice, Router
from gangline_moe.routers.sigmoid import weigh_choice


class GroupedRouter(Router):
    """Sigmoid router limited to the best groups; see `Router`."""

    node: GroupedNode

    def choose(self, logits_NE: Tensor) -> Choice:
        score_NE = logits_NE.sigmoid()
        return weigh_choice(self.node, logits_NE, score_NE, self.choose_top_k(score_NE))

    def choose_top_k(self, score_NE: Tensor) -> Tensor:
        """Return the `top_k` experts of each token, from its best groups only, (N, k)."""
        scores = self.add_bias(score_NE)
        by_group = scores.view(len(scores), self.node.groups, -1)
        worth = by_group.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(self.node.top_groups, dim=-1).indices
        left_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        scores = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)
        return scores.topk(self.node.top_k, dim=-1).indices
