"""Expert-choice router: experts choose tokens (Zhou et al., arXiv 2202.09368, section 3.2).

Each expert takes C = N · top_k / E tokens (rounded up) of the microbatch on this rank: those with the highest scores
for the expert. A token may have no expert or all experts. The host waits for the maximum number of experts per token. A
token's experts depend on later tokens of its sequence, so autoregressive generation gives different outputs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gangline_moe.nodes import ExpertChoiceNode
from gangline_moe.routers.base import Choice, Router


class ExpertChoiceRouter(Router):
    """Router by which experts choose tokens; see `Router`."""

    node: ExpertChoiceNode

    def choose(self, logits_NE: Tensor) -> Choice:
        N, E = logits_NE.shape
        prob_NE = logits_NE.softmax(-1)
        count = min(N, -(-N * self.node.top_k // E))
        tokens = prob_NE.detach().topk(count, dim=0).indices
        chosen_NE = torch.zeros_like(prob_NE, dtype=torch.bool).scatter_(0, tokens, True)
        # on the meta device: assume top_k experts per token
        most = self.node.top_k if chosen_NE.is_meta else int(chosen_NE.sum(1).max())
        every = torch.arange(E, device=prob_NE.device)
        expert_Nk = torch.where(chosen_NE, every, E).sort(-1).values[:, :most].contiguous()
        weight_Nk = prob_NE.gather(1, expert_Nk.clamp(max=E - 1))
        return Choice(expert_Nk, weight_Nk, prob_NE, logits_NE, whole=False)
