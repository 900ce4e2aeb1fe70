"""Module of the model edit `patches`: B sequences, T tokens, D features, P patches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import unfold

from gangline.model.linear import Embedding


class PatchEmbedding(Embedding):
    def __init__(self, node) -> None:
        super().__init__(node)
        self.patch = node.patch
        self.patches = nn.Parameter(torch.empty(node.dim, 3 * node.patch**2))

    def forward(self, batch) -> Tensor:
        hidden_BTD = super().forward(batch)
        patches_BPX = unfold(batch.extra["pixels"].to(self.patches.dtype), self.patch, stride=self.patch).transpose(
            1, 2
        )
        image_BPD = patches_BPX @ self.patches.T
        return torch.cat([image_BPD.to(hidden_BTD.dtype), hidden_BTD[:, image_BPD.shape[1] :]], 1)
