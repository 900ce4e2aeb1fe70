# gangline_squared/modules.py: imported only by runs that choose the part
from torch import nn

from gangline.model.build import construct


class SquaredFeedForward(nn.Module):
    """Feed-forward W_down relu(W_up x)^2 of hidden (..., D)."""

    def __init__(self, node):  # modules get their node as the only argument
        super().__init__()
        self.w_up, self.w_down = construct(node.w_up), construct(node.w_down)

    def forward(self, hidden):
        return self.w_down(self.w_up(hidden).relu().square())
