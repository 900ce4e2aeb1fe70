"""Short causal convolution, depthwise (Fu et al., H3, arXiv 2212.14052, section 3.1; Gated DeltaNet).

The generation cache stores the last (taps - 1) inputs.

B batch, T tokens, F features (channels)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gangline.comm.base import Comm
from gangline.model.cache import Cache, Carried
from gangline_models.delta_nodes import ShortConvolutionNode


class ShortConvolution(nn.Module):
    """Causal depthwise convolution within documents, then SiLU: x (B, T, F) -> (B, T, F)."""

    def __init__(self, node: ShortConvolutionNode) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(node.channels, 1, node.width))

    def bind(self, axis: Comm) -> None:
        """Ignore the ranks: channels are sharded by head, so no communication is needed."""

    def forward(self, x_BTF: Tensor, document_BT: Tensor | None, cache: Cache | None = None) -> Tensor:
        if cache is None:
            return self.convolve_tokens(x_BTF, document_BT)
        carried = cache.get(self, Carried)
        if carried.tensor is None:
            carried.tensor = self.get_tail(x_BTF, document_BT)
            return self.convolve_tokens(x_BTF, document_BT)
        seen_BTF = torch.cat((carried.tensor, x_BTF), dim=1)
        carried.tensor = seen_BTF[:, 1:]
        return F.silu((seen_BTF * self.weight.to(x_BTF.dtype).squeeze(1).T).sum(1, keepdim=True))

    def get_tail(self, x_BTF: Tensor, document_BT: Tensor | None) -> Tensor:
        """Return the last inputs, for the next token, (B, taps - 1, F); zeros before the start of the last document."""
        if document_BT is not None:
            x_BTF = x_BTF * (document_BT == document_BT[:, -1:])[..., None]
        tail_length = self.weight.shape[-1] - 1
        return F.pad(x_BTF, (0, 0, tail_length, 0))[:, x_BTF.shape[1] :]

    def convolve_tokens(self, x_BTF: Tensor, document_BT: Tensor | None) -> Tensor:
        """Convolve all tokens and apply SiLU, (B, T, F)."""
        taps = self.weight.to(x_BTF.dtype).squeeze(1).unbind(-1)  # the last tap multiplies the current token
        y = x_BTF * taps[-1]
        for back, tap in enumerate(reversed(taps[:-1]), start=1):
            earlier = F.pad(x_BTF, (0, 0, back, 0))[:, : x_BTF.shape[1]]
            if document_BT is not None:
                same = F.pad(document_BT, (back, 0), value=-1)[:, : document_BT.shape[1]] == document_BT
                earlier = earlier * same[..., None]
            y = y + earlier * tap
        return F.silu(y)
