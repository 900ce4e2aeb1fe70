"""Config nodes of modules that the decoder of gangline-basics lacks. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.linear_nodes import LINEAR, EmbeddingNode, fit_linears
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Decoding, Node, Shape
from gangline_basics.model.decoder_nodes import DecoderNode, NormNode


@dataclass(frozen=True, kw_only=True)
class WidthNormNode(NormNode):
    """Config node of RMSNorm over all heads together; dim: total width of all heads."""

    module: ClassVar[str] = "gangline_models.modules.width_norm:WidthNorm"

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the input and of one statistic per token; tp shards the heads."""
        width = self.dim // sizes.size("tp")
        return sizes.inner_tokens * (width * sizes.itemsize + sizes.master_itemsize)


@dataclass(frozen=True, kw_only=True)
class LayerNormNode(NormNode):
    """Config node of LayerNorm. bias: whether it has a bias in addition to its weight."""

    module: ClassVar[str] = "gangline_models.modules.layer_norm:LayerNorm"
    bias: bool = True

    def get_shapes(self) -> dict[str, Shape]:
        return dict.fromkeys(("weight", "bias") if self.bias else ("weight",), (self.dim,))

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the input, and of mean and inverse deviation of each token."""
        return sizes.tokens * (self.dim * sizes.itemsize + 2 * sizes.master_itemsize)


@dataclass(frozen=True, kw_only=True)
class UngatedFeedForwardNode(Node):
    """Config node of an ungated feed-forward: two linears with GELU in between. gelu: "tanh" or "exact"."""

    module: ClassVar[str] = "gangline_models.modules.ungated:UngatedFeedForward"
    dim: int
    ffn_dim: int
    gelu: str = "tanh"
    w_up: Node = LINEAR
    w_down: Node = LINEAR

    def __post_init__(self) -> None:
        fit_linears(self, {"w_up": (self.dim, self.ffn_dim), "w_down": (self.ffn_dim, self.dim)})

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of x, and of the first matmul's output before and after GELU."""
        inner = sizes.inner_tokens * self.ffn_dim // sizes.size("tp")
        return (sizes.tokens * self.dim + 2 * inner) * sizes.itemsize


@dataclass(frozen=True, kw_only=True)
class PositionedEmbeddingNode(Node):
    """Config node of token plus position embeddings; `positions.vocab_size` is the number of positions."""

    module: ClassVar[str] = "gangline_models.modules.positions:PositionedEmbedding"
    tokens: EmbeddingNode
    positions: EmbeddingNode

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class PositionedDecoderNode(DecoderNode):
    """Config node of a decoder whose embedding is a `PositionedEmbeddingNode`."""

    def get_ties(self) -> dict[str, str]:
        return {"head.weight": "embed.tokens.weight"} if self.tied else {}
