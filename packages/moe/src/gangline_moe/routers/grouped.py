"""Group-limited choice (DeepSeek-V3, arXiv 2412.19437, section 2.1.2, "node-limited routing").

A group of neighbouring experts is worth the sum of its two largest scores, biases included; a token's experts come from
the best `top_groups` groups, so that its rows go to few nodes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline_moe.nodes import GroupedNode
from gangline_moe.routers.sigmoid import SigmoidRouter


class GroupedRouter(SigmoidRouter):
    """See `Router`."""

    node: GroupedNode

    def top(self, score_NE: Tensor) -> Tensor:
        seen = score_NE.detach()
        if self.bias is not None:
            seen = seen + self.bias
        by_group = seen.view(len(seen), self.node.groups, -1)
        worth = by_group.topk(2, dim=-1).values.sum(-1)
        best = worth.topk(self.node.top_groups, dim=-1).indices
        left_out = torch.ones_like(worth, dtype=torch.bool).scatter_(1, best, False)
        seen = by_group.masked_fill(left_out[..., None], -torch.inf).flatten(1)
        return seen.topk(self.node.top_k, dim=-1).indices
