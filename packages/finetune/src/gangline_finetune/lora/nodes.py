"""Config nodes of adapters (LoRA, DoRA). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Decoding, Node, Shape, WrapNode


@dataclass(frozen=True, kw_only=True)
class LengthsNode(Node):
    """Config node of DoRA's differences of row norms, for a weight (out, in)."""

    module: ClassVar[str] = "gangline_finetune.lora.modules:Lengths"
    out_features: int

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.out_features,)}

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_flops(self, sequence_length: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class LoraNode(WrapNode):
    """Config node of a linear, or stack of linears, with a low-rank adapter: lora_a (rank, in), lora_b (out, rank)."""

    module: ClassVar[str] = "gangline_finetune.lora.modules:Lora"
    lora_a: LinearNode
    lora_b: LinearNode
    scale: float

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of A x, saved for the gradient of B."""
        return self.lora_a.count_rows(sizes) * self.lora_a.out_features * sizes.itemsize


@dataclass(frozen=True, kw_only=True)
class DroppedLoraNode(LoraNode):
    """Config node of a LoRA linear with dropout. site: the linear's path in its block, which keys the random draw."""

    module: ClassVar[str] = "gangline_finetune.lora.modules:DroppedLora"
    dropout: float = 0.0
    site: str

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of A x; with dropout also of the input of A and the dropout mask."""
        dropped = 2 * self.lora_a.in_features if self.dropout else 0
        return super().count_activation_bytes(sizes) + self.lora_a.count_rows(sizes) * dropped * sizes.itemsize


@dataclass(frozen=True, kw_only=True)
class DoraNode(DroppedLoraNode):
    """Config node of a DoRA linear, with trained row norms."""

    module: ClassVar[str] = "gangline_finetune.lora.modules:Dora"
    lora_lengths: LengthsNode

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of `DroppedLoraNode` plus the linear's output, saved for the gradient of the row norms."""
        return (
            super().count_activation_bytes(sizes)
            + self.lora_b.count_rows(sizes) * self.lora_b.out_features * sizes.itemsize
        )
