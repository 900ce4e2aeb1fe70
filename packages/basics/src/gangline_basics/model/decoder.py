"""The complete decoder: embedding, blocks, head. Single-device code, independent of ranks."""

from __future__ import annotations

from torch import Tensor, nn

from gangline.batch import Batch
from gangline.model.build import construct
from gangline_basics.model.decoder_nodes import DecoderNode


class Decoder(nn.Module):
    """Decoder-only transformer; maps a batch to the loss summed over its valid targets, 0-d."""

    def __init__(self, node: DecoderNode) -> None:
        super().__init__()
        self.embed = construct(node.embed)
        self.blocks = nn.ModuleList(construct(block) for block in node.blocks)
        self.head = construct(node.head)
        for alias, owner in node.get_ties().items():
            module, _, name = alias.rpartition(".")
            setattr(self.get_submodule(module), name, self.get_parameter(owner))

    def hidden(self, batch: Batch) -> Tensor:
        """Return the output of the last block, (B, T, D)."""
        hidden_BTD = self.embed(batch)
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD, batch)
        return hidden_BTD

    def forward(self, batch: Batch) -> Tensor:
        return self.head(self.hidden(batch), batch)

    def compute_logits(self, batch: Batch) -> Tensor:
        """Return the logits of the next token, (B, T, V), in float32 at least."""
        return self.head.compute_logits(self.hidden(batch))
