# gangline_turns/modules.py: imported only by runs that select the part
import torch

from gangline_moe.routers.base import Choice, Router


class TurnsRouter(Router):
    """Router with consecutive experts, beginning `first` after the highest-scoring one; layout-invariant."""

    def choose(self, logits_NE):
        E = logits_NE.shape[1]
        first_N1 = (logits_NE.argmax(-1, keepdim=True) + self.node.first) % E
        expert_Nk = (first_N1 + torch.arange(self.node.top_k)) % E
        prob_NE = logits_NE.softmax(-1)
        return Choice(expert_Nk, prob_NE.gather(1, expert_Nk), prob_NE, logits_NE)
