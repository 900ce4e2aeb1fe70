"""Config nodes of gated delta-rule layers and of gated attention. Torch-free; the mathematics is in their modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gangline.model.calls import Call
from gangline.model.linear_nodes import LINEAR, fit_linears
from gangline.model.local_sizes import LocalSizes
from gangline.model.products import Product
from gangline.model.tree import Decoding, Node, Shape
from gangline_basics.model.decoder_nodes import AttentionNode, NormNode

CHUNK = 64  # tokens that a delta-rule layer multiplies at once


@dataclass(frozen=True, kw_only=True)
class HeadNormNode(NormNode):
    """Root-mean-square normalisation of each of `heads` heads, of width `dim`."""

    heads: int

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Its input and one number of each head, and where the weight counts from 1 their sum."""
        heads = max(1, self.heads // sizes.size("tp"))
        nbytes = sizes.inner_tokens * heads * (self.dim * sizes.itemsize + sizes.master_itemsize)
        return nbytes + (self.dim * sizes.itemsize if self.offset else 0)


@dataclass(frozen=True, kw_only=True)
class RecomputedNormNode(NormNode):
    """A norm in what a layer computes again in its backward pass."""

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Nothing."""
        return 0


@dataclass(frozen=True, kw_only=True)
class GatedAttentionNode(AttentionNode):
    """Attention whose output is gated: `wq` makes of each head its query, and behind it its gate."""

    module: ClassVar[str] = "gangline_models.modules.gated_attention:GatedAttention"

    def __post_init__(self) -> None:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fit_linears(self, {"wq": (self.dim, 2 * q), "wk": (self.dim, kv), "wv": (self.dim, kv), "wo": (q, self.dim)})

    def get_seams(self) -> Mapping[str, Call]:
        return super().get_seams()

    def get_decoding(self) -> Decoding | None:
        return super().get_decoding()

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """x; queries and keys after rotation, values, the output and its log-sum-exp; the gate, which lies beside what
        the norm of queries keeps, what it becomes, and the gated output.
        """
        heads, key_heads = self.heads // sizes.size("tp"), max(1, self.kv_heads // sizes.size("tp"))
        inner = (5 * heads + 2 * key_heads) * self.head_dim
        elements = sizes.tokens * self.dim + sizes.inner_tokens * inner
        return elements * sizes.itemsize + sizes.inner_tokens * heads * sizes.master_itemsize


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionNode(Node):
    """`width` taps of each of `channels` channels."""

    module: ClassVar[str] = "gangline_models.modules.short_convolution:ShortConvolution"
    channels: int
    width: int

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.channels, 1, self.width)}

    def get_decoding(self) -> Decoding | None:
        return "cached"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Nothing: the layer computes it again."""
        return 0

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...]:
        return ()

    def count_flops(self, sequence_length: int) -> int:
        """None that a matrix unit computes."""
        return 0


@dataclass(frozen=True, kw_only=True)
class DecayNode(Node):
    """How fast each of `heads` heads forgets."""

    module: ClassVar[str] = "gangline_models.modules.delta:Decay"
    heads: int

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Nothing: the layer computes it again."""
        return 0

    def get_shapes(self) -> dict[str, Shape]:
        return {"a_log": (self.heads,), "dt_bias": (self.heads,)}


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNode(Node):
    """A layer with the gated delta rule: `key_heads` of width `key_dim`, each for `heads` / `key_heads` value heads.

    It says nothing of the seam `attention`: what it remembers goes from token to token, so tokens are not cut.
    """

    module: ClassVar[str] = "gangline_models.modules.delta:GatedDelta"
    dim: int
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_q: ShortConvolutionNode
    conv_k: ShortConvolutionNode
    conv_v: ShortConvolutionNode
    decay: DecayNode
    norm: NormNode
    wqkvz: Node = LINEAR
    wba: Node = LINEAR
    w_out: Node = LINEAR
    chunk: int = CHUNK

    def __post_init__(self) -> None:
        values = self.heads * self.value_dim
        both = 2 * self.key_heads * self.key_dim + 2 * values
        fit_linears(self, {"wqkvz": (self.dim, both), "wba": (self.dim, 2 * self.heads), "w_out": (values, self.dim)})

    def get_decoding(self) -> Decoding | None:
        return "cached"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """x, what the first two products make of it, and what the last one reads; all between is computed again."""
        values = self.heads * self.value_dim
        inner = 2 * self.key_heads * self.key_dim + 3 * values + 2 * self.heads
        return (sizes.tokens * self.dim + sizes.inner_tokens * inner // sizes.size("tp")) * sizes.itemsize

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...] | None:
        """It does not say."""
        return None

    def count_flops(self, sequence_length: int) -> int:
        """Reading and writing the state, and inside of a chunk scores, their inverse and what they read."""
        chunk = min(self.chunk, sequence_length)
        state = 3 * self.key_dim * self.value_dim
        inside = chunk * (2 * self.key_dim + 2 * self.value_dim + (self.key_dim + self.value_dim) // 2)
        return 2 * self.heads * (state + inside)
