"""Config nodes of the decoder: norm, attention, feed-forward, block, head. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gangline.model.calls import AttentionCall, Call, LossCall
from gangline.model.linear_nodes import LINEAR, fit_linears
from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AnyMatmul, AttentionMatmuls
from gangline.model.tree import Decoding, Node, Shape, iterate_children, iterate_nodes
from gangline_basics.model.attention_backend import AttentionBackend
from gangline_basics.model.gating import SWIGLU, Gating
from gangline_basics.model.rope_rates import PLAIN_ROPE, Rope


@dataclass(frozen=True, kw_only=True)
class NormNode(Node):
    """Root-mean-square normalisation over the last dim; `offset` is added to the weight."""

    module: ClassVar[str] = "gangline_basics.model.norm:RMSNorm"
    dim: int
    eps: float = 1e-5
    offset: float = 0.0

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.dim,)}

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class SinksNode(Node):
    """Attention sinks: a learned logit per query head, in the denominator of the head's softmax (`AttentionCall`)."""

    module: ClassVar[str] = "gangline_basics.model.attention:Sinks"
    heads: int

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.heads,)}

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class AttentionNode(Node):
    """Self-attention with grouped key and value heads; `q_norm` and `k_norm` normalise each head's features.

    causal, window, scale, soft_cap and sinks are the fields of the `AttentionCall` at the `attention` seam. backend:
    kernels of the process that computes the attention.
    """

    module: ClassVar[str] = "gangline_basics.model.attention:Attention"
    dim: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None = PLAIN_ROPE
    q_norm: NormNode | None = None
    k_norm: NormNode | None = None
    wq: Node = LINEAR
    wk: Node = LINEAR
    wv: Node = LINEAR
    wo: Node = LINEAR
    causal: bool = True
    window: int | None = None
    scale: float | None = None
    soft_cap: float | None = None
    sinks: SinksNode | None = None
    backend: AttentionBackend = "auto"

    def __post_init__(self) -> None:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        fit_linears(self, {"wq": (self.dim, q), "wk": (self.dim, kv), "wv": (self.dim, kv), "wo": (q, self.dim)})

    def count_flops(self, sequence_length: int) -> int:
        """Return the FLOPs per token of q·k and p·v with all keys of the window (PaLM: no half for causal)."""
        return 4 * self.heads * self.head_dim * min(sequence_length, self.window or sequence_length)

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...]:
        return (
            AttentionMatmuls.of_tokens(
                sizes.tokens,
                sequence_length,
                heads=self.heads,
                kv_heads=self.kv_heads,
                head_dim=self.head_dim,
                causal=self.causal,
                window=self.window,
            ),
        )

    @property
    def call(self) -> AttentionCall:
        """Call at the `attention` seam of this node."""
        sinks = "sinks.weight" if self.sinks else None
        return AttentionCall(
            causal=self.causal, window=self.window, scale=self.scale, soft_cap=self.soft_cap, sinks=sinks
        )

    def get_seams(self) -> Mapping[str, Call]:
        return {"attention": self.call}

    def get_decoding(self) -> Decoding | None:
        return "cached" if self.causal and not self.call.beyond else None


@dataclass(frozen=True, kw_only=True)
class FeedForwardNode(Node):
    """Gated feed-forward: SwiGLU, or another GLU variant given by `gating`."""

    module: ClassVar[str] = "gangline_basics.model.feed_forward:FeedForward"
    dim: int
    ffn_dim: int
    gating: Gating = SWIGLU
    w_gate: Node = LINEAR
    w_up: Node = LINEAR
    w_down: Node = LINEAR

    def __post_init__(self) -> None:
        up, down = (self.dim, self.ffn_dim), (self.ffn_dim, self.dim)
        fit_linears(self, {"w_gate": up, "w_up": up, "w_down": down})

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class BlockNode(Node):
    """Attention, then feed-forward, each added to the residual stream, with a norm before it, after it, or both."""

    module: ClassVar[str] = "gangline_basics.model.block:Block"
    attention_norm: Node | None = None
    attention: Node
    attention_out_norm: Node | None = None
    feed_forward_norm: Node | None = None
    feed_forward: Node
    feed_forward_out_norm: Node | None = None
    residual_scale: float = 1.0

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class HeadNode(Node):
    """Final norm, matmul to vocabulary logits, and loss; `z` and `soft_cap` are fields of `LossCall`.

    scale  factor of the logits before a soft cap; implemented as a factor of the matmul's input
    chunk  number of tokens whose logits the loss computes at a time (`run.loss_chunk`); None: all tokens
    """

    module: ClassVar[str] = "gangline_basics.model.head:Head"
    vocab_size: int
    dim: int
    norm: Node
    z: float = 0.0
    soft_cap: float | None = None
    scale: float = 1.0
    chunk: int | None = None

    @property
    def call(self) -> LossCall:
        """Call at the `loss` seam of this node."""
        return LossCall(z=self.z, soft_cap=self.soft_cap)

    def chunk_loss(self, tokens: int) -> Node:
        return replace(self, chunk=tokens)

    def get_seams(self) -> Mapping[str, Call]:
        return {"loss": self.call}

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.dim)}

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class DecoderNode(Node):
    """The complete decoder. `tied`: the head uses the embedding's weight."""

    module: ClassVar[str] = "gangline_basics.model.decoder:Decoder"
    embed: Node
    blocks: tuple[Node, ...]
    head: Node
    tied: bool = False

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def get_ties(self) -> dict[str, str]:
        own = {"head.weight": "embed.weight"} if self.tied else {}
        below = (pair for name, child in iterate_children(self) for pair in iterate_nodes(child, name))
        return own | {f"{at}.{alias}": own.get(of, of) for at, node in below for alias, of in node.get_ties().items()}
