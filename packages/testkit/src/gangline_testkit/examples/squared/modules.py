# gangline_squared/modules.py: imported by a run that has chosen the part, and by nothing else
from torch import nn

from gangline.model.build import construct


class SquaredFeedForward(nn.Module):
    """Feed-forward with a squared ReLU: hidden (..., D) -> (..., D)."""

    def __init__(self, node):  # the node is the only argument
        super().__init__()
        self.w_up, self.w_down = construct(node.w_up), construct(node.w_down)

    def forward(self, hidden):
        return self.w_down(self.w_up(hidden).relu().square())
