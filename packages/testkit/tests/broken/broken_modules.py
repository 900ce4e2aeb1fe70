"""Modules of the broken model edits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from gangline.model import forward_context
from gangline_basics.model.attention import Attention
from gangline_basics.model.feed_forward import FeedForward
from gangline_testkit.toys.lanes import LanesModule


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
        forward_context.emit_metric("use", use, "sum")
        forward_context.emit_metric("energy", energy.sum(), "mean")
        forward_context.emit_metric("peak", energy.max(), "max")
        return forward_context.emit_loss(y_BTD, self.penalty * energy.sum(), "penalty")


class OwnTokensModule(FeedForward):
    """Sums squares over the local tokens, without `forward_context.sum_over_sequence`."""

    def forward(self, x_BTD):
        squares = x_BTD.square().mean(-1, keepdim=True).sum(1, keepdim=True)
        return super().forward(x_BTD / (1 + squares))


class ConfigSizesModule(FeedForward):
    """Splits features into groups of four; the number of groups comes from the node, not from the local tensor."""

    def __init__(self, node):
        super().__init__(node)
        self.groups = node.ffn_dim // 4

    def forward(self, x_BTD):
        active = F.silu(self.w_gate(x_BTD)) * self.w_up(x_BTD)
        grouped = active.unflatten(-1, (self.groups, 4))
        return self.w_down(grouped.flatten(-2))


class UndeclaredPartialModule(FeedForward):
    """Multiplies the local shard of tp-sharded features by a replicated gain."""

    def __init__(self, node):
        super().__init__(node)
        self.gain = nn.Parameter(torch.empty(1))

    def forward(self, x_BTD):
        return self.w_down(F.silu(self.w_gate(x_BTD)) * self.w_up(x_BTD) * (1 + self.gain))


class RemembersModule(FeedForward):
    """Every second layer adds half of the output of the layer before."""

    left = None

    def forward(self, x_BTD):
        own, before = super().forward(x_BTD), RemembersModule.left
        RemembersModule.left = own.detach() if before is None else None
        return own if before is None else own + 0.5 * before


class ShiftsModule(FeedForward):
    """Adds to each token's output the output of the previous token."""

    def forward(self, x_BTD):
        own = super().forward(x_BTD)
        return own + torch.cat((torch.zeros_like(own[:, :1]), own[:, :-1]), dim=1)


class LowRankModule(FeedForward):
    """Adds a low-rank term B A x to the output."""

    def __init__(self, node):
        super().__init__(node)
        self.a, self.b = nn.Parameter(torch.empty(2, node.dim)), nn.Parameter(torch.empty(node.dim, 2))

    def forward(self, x_BTD):
        return super().forward(x_BTD) + x_BTD @ self.a.T @ self.b.T


class IdleModule(UndeclaredPartialModule):
    def forward(self, x_BTD):
        return FeedForward.forward(self, x_BTD)


class SwapsAttentionModule(Attention):
    """Attention with a causal window of three keys."""

    def __init__(self, node):
        super().__init__(node)
        self.attention = windowed


def windowed(q, k, v, document, position):
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
