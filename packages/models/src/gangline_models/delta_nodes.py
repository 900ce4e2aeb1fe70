"""Config nodes of gated delta-rule layers and of gated attention. Torch-free; the formulas are in their modules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gangline.model.calls import Call
from gangline.model.linear_nodes import LINEAR, fit_linears
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AnyMatmul
from gangline.model.tree import Decoding, Node, Shape
from gangline_basics.model.decoder_nodes import AttentionNode, NormNode

CHUNK = 64  # number of tokens per chunk of a delta-rule layer


@dataclass(frozen=True, kw_only=True)
class HeadNormNode(NormNode):
    """Config node of an RMSNorm applied to each of `heads` heads of width `dim`."""

    heads: int

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the input, of one statistic per token and head, and, with `offset`, of weight + 1."""
        heads = max(1, self.heads // sizes.size("tp"))
        nbytes = sizes.inner_tokens * heads * (self.dim * sizes.itemsize + sizes.master_itemsize)
        return nbytes + (self.dim * sizes.itemsize if self.offset else 0)


@dataclass(frozen=True, kw_only=True)
class RecomputedNormNode(NormNode):
    """Config node of a norm that the enclosing layer recomputes in its backward pass."""

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return 0: the enclosing layer recomputes the norm."""
        return 0


@dataclass(frozen=True, kw_only=True)
class GatedAttentionNode(AttentionNode):
    """Config node of attention with gated output: `wq` computes each head's query, followed by the head's gate."""

    module: ClassVar[str] = "gangline_models.modules.gated_attention:GatedAttention"

    def __post_init__(self) -> None:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fit_linears(self, {"wq": (self.dim, 2 * q), "wk": (self.dim, kv), "wv": (self.dim, kv), "wo": (q, self.dim)})

    def get_seams(self) -> Mapping[str, Call]:
        return super().get_seams()

    def get_decoding(self) -> Decoding | None:
        return super().get_decoding()

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return the bytes of the saved activations.

        Saved are x; rotated queries and keys, values, the output and its log-sum-exp; the gate (in one tensor with the
        input of the query norm), the gate's sigmoid, and the gated output.
        """
        heads, key_heads = self.heads // sizes.size("tp"), max(1, self.kv_heads // sizes.size("tp"))
        inner = (5 * heads + 2 * key_heads) * self.head_dim
        elements = sizes.tokens * self.dim + sizes.inner_tokens * inner
        return elements * sizes.itemsize + sizes.inner_tokens * heads * sizes.master_itemsize


@dataclass(frozen=True, kw_only=True)
class ShortConvolutionNode(Node):
    """Config node of a short causal convolution: `width` taps for each of `channels` channels."""

    module: ClassVar[str] = "gangline_models.modules.short_convolution:ShortConvolution"
    channels: int
    width: int

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.channels, 1, self.width)}

    def get_decoding(self) -> Decoding | None:
        return "cached"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return 0: the enclosing layer recomputes the convolution."""
        return 0

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...]:
        return ()

    def count_flops(self, sequence_length: int) -> int:
        """Return 0: the convolution has no matmul."""
        return 0


@dataclass(frozen=True, kw_only=True)
class DecayNode(Node):
    """Config node of the state decay of each of `heads` heads."""

    module: ClassVar[str] = "gangline_models.modules.delta:Decay"
    heads: int

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return 0: the enclosing layer recomputes the decay."""
        return 0

    def get_shapes(self) -> dict[str, Shape]:
        return {"a_log": (self.heads,), "dt_bias": (self.heads,)}


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNode(Node):
    """Config node of a gated delta-rule layer: `key_heads` key heads and `heads` value heads.

    It declares no seam `attention`: its state passes from token to token, so a sequence cannot be sharded (context
    parallelism). Each key head, of width `key_dim`, serves heads / key_heads value heads of `value_dim`.
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
        """Return the bytes of x, the outputs of wqkvz and wba, and the input of w_out; all else is recomputed."""
        values = self.heads * self.value_dim
        inner = 2 * self.key_heads * self.key_dim + 3 * values + 2 * self.heads
        return (sizes.tokens * self.dim + sizes.inner_tokens * inner // sizes.size("tp")) * sizes.itemsize

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...] | None:
        """Return None: the matmuls inside chunks are not listed."""
        return None

    def count_flops(self, sequence_length: int) -> int:
        """Return the FLOPs per token: state reads and writes; and in a chunk, scores, triangular solve and outputs."""
        chunk = min(self.chunk, sequence_length)
        state = 3 * self.key_dim * self.value_dim
        inside = chunk * (2 * self.key_dim + 2 * self.value_dim + (self.key_dim + self.value_dim) // 2)
        return 2 * self.heads * (state + inside)
