# gangline_squared/modules.py: imported by a run that has chosen the part, and by nothing else
from torch import nn

from gangline.model.linear import Linear


class SquaredFeedForward(nn.Module):
    """hidden (..., D) -> (..., D)"""

    def __init__(self, node):  # the node, and nothing else
        super().__init__()
        self.w_up = Linear(node.dim, node.hidden)
        self.w_down = Linear(node.hidden, node.dim)

    def forward(self, hidden):
        return self.w_down(self.w_up(hidden).relu().square())
