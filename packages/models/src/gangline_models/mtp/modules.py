"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

For token i, module k of n reads the hidden state of module k - 1 and the embedding of token i + k, and predicts token
i + k + 1. Module 1 reads the hidden state of the model after its last norm, as in the inference code of DeepSeek-V3.

    h'_k = M_k [norm(embed(t_{i+k})); norm(h_{k-1})]     h_k = block_k(h'_k)     p_k = head(norm(h_k))
    objective = loss + weight / n · Σ_k loss_k           sums over tokens, divided by the count of next-token targets

B batch, T tokens, t tokens of this rank's shard of a sequence, D model width
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import Wrapper, construct
from gangline.model.forward_context import emit_loss, emit_metric, emit_under
from gangline_models.mtp.nodes import MtpHeadNode, MtpNode


class MtpModule(nn.Module):
    """Prediction module: h_{k-1} (B, t, D) -> h_k (B, t, D); it shares the model's embedding and head weight."""

    def __init__(self, node: MtpNode) -> None:
        super().__init__()
        self.embed = construct(node.embed)
        self.embed_norm = construct(node.embed_norm)
        self.hidden_norm = construct(node.hidden_norm)
        self.merge = construct(node.merge)
        self.block = construct(node.block)
        self.head = construct(node.head)
        self.path = node.path

    def forward(self, hidden_BTD: Tensor, batch: Batch, tokens_BT: Tensor) -> Tensor:
        """Return h_k, (B, t, D). tokens_BT: token i + k for each token i."""
        ahead_BTD = self.embed_norm(self.embed(replace(batch, tokens=tokens_BT)))
        both = torch.cat((ahead_BTD, self.hidden_norm(hidden_BTD)), -1)
        with emit_under(self.path):
            return self.block(self.merge(both), batch)


class MtpHead(Wrapper):
    """Head: hidden states (B, t, D) -> next-token loss; in training `mtp_loss` contributes to the gradients."""

    weight: Tensor  # weight of the wrapped head
    loss: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    norm: nn.Module
    scale_hidden: Callable[[Tensor], Tensor]

    def wrap(self, node: MtpHeadNode) -> None:
        self.mtp = nn.ModuleList(construct(module) for module in node.mtp)
        self.share = node.weight / len(node.mtp)

    def forward(self, hidden_BTD: Tensor, batch: Batch) -> Tensor:
        if not self.training:
            return super().forward(hidden_BTD, batch)
        hidden_BTD = self.norm(hidden_BTD)
        loss = self.loss(self.scale_hidden(hidden_BTD), self.weight, batch.targets, batch.loss_mask)
        # Under sequence parallelism each rank has the loss of all T tokens, and emitted values are summed over ranks.
        ranks = batch.tokens.shape[1] // hidden_BTD.shape[1]
        further, targets = [], []
        module: Any
        for k, module in enumerate(self.mtp, 1):
            tokens_BT, _ = batch.shift_targets(k - 1)
            targets_BT, counts_BT = batch.shift_targets(k)
            hidden_BTD = module(hidden_BTD, batch, tokens_BT)
            head = module.head
            further.append(head.loss(head.normalise(hidden_BTD), head.weight, targets_BT, counts_BT))
            targets.append(counts_BT.sum())
        losses = torch.stack(further)
        emit_metric("mtp_nats", losses / ranks)
        emit_metric("mtp_targets", torch.stack(targets) / ranks)
        term = self.share * losses.sum()
        return emit_loss(loss, term - (1 - 1 / ranks) * term.detach(), "mtp_loss")
