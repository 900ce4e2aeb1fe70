"""Count the costs of modules that only other systems have. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.linear_nodes import LINEAR, fit_linears
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AnyMatmul, AttentionMatmuls, Matmul
from gangline.model.tree import Node, Shape

NOWHERE = "published.nodes:nothing_is_built"


@dataclass(frozen=True, kw_only=True)
class GeluNode(Node):
    """Two matmuls with a GELU between them: GPT's feed-forward. Saves its input, and the input and output of GELU."""

    module: ClassVar[str] = NOWHERE
    dim: int
    ffn_dim: int
    w_up: Node = LINEAR
    w_down: Node = LINEAR

    def __post_init__(self) -> None:
        fit_linears(self, {"w_up": (self.dim, self.ffn_dim), "w_down": (self.ffn_dim, self.dim)})

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        inner = 2 * sizes.inner_tokens * (self.ffn_dim // sizes.size("tp"))
        return (sizes.tokens * self.dim + inner) * sizes.itemsize


@dataclass(frozen=True, kw_only=True)
class LatentAttentionNode(Node):
    """Attention with latent keys and values (DeepSeek-V2, arXiv 2405.04434, section 2.1), as computed in training."""

    module: ClassVar[str] = NOWHERE
    dim: int
    heads: int
    query_rank: int
    kv_rank: int
    nope: int  # width of the part of a head without rotary embedding
    rope: int  # width of the part with rotary embedding; its keys are shared by all heads
    value: int

    def get_shapes(self) -> dict[str, Shape]:
        return {
            "wq_a": (self.query_rank, self.dim),
            "wq_b": (self.heads * (self.nope + self.rope), self.query_rank),
            "wkv_a": (self.kv_rank + self.rope, self.dim),
            "wkv_b": (self.heads * (self.nope + self.value), self.kv_rank),
            "wo": (self.dim, self.heads * self.value),
        }

    def count_flops(self, sequence_length: int) -> int:
        """Return the FLOPs of a token: matmuls, and attention scores and sums over all keys."""
        attention = 2 * self.heads * sequence_length * (self.nope + self.rope + self.value)
        return super().count_flops(sequence_length) + attention

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...]:
        matrices = tuple(
            Matmul(rows=sizes.tokens, inner=shape[1], columns=shape[0], weight=name)
            for name, shape in self.get_shapes().items()
        )
        width = (self.nope + self.rope + self.value) // 2
        return (
            *matrices,
            AttentionMatmuls.of_tokens(
                sizes.tokens, sequence_length, heads=self.heads, kv_heads=self.heads, head_dim=width
            ),
        )

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        heads = self.heads // sizes.size("tp")
        inner = heads * (2 * (self.nope + self.rope) + 2 * self.value) + self.query_rank + self.kv_rank
        return (sizes.tokens * self.dim + sizes.inner_tokens * inner) * sizes.itemsize
