"""Modules of the broken edits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from gangline import inside
from gangline.testing.toys.lanes import LanesModule


class OwnLanesModule(LanesModule):
    """On a fold, each token passes only through the lanes of its own rank."""

    def forward(self, x_BTD):
        if self.axis is None or self.axis.size == 1:
            return super().forward(x_BTD)
        here = self.w_in.shape[0]
        first = self.axis.index * here
        active = F.silu(torch.einsum("btd,nhd->btnh", x_BTD, self.w_in))
        gain = 1 + self.balance[first : first + here]
        y_BTD = torch.einsum("btnh,ndh,n->btd", active, self.w_out, gain)
        use = torch.zeros_like(self.balance)
        use[first : first + here] = (active.detach() > 0).sum((0, 1, 3)).double()
        energy = y_BTD.square().mean(-1)
        inside.emit_metric("use", use, "sum")
        inside.emit_metric("energy", energy.sum(), "mean")
        inside.emit_metric("peak", energy.max(), "max")
        return inside.emit_loss(y_BTD, self.penalty * energy.sum(), "penalty")
