"""Nodes of a decoder from its options, used by every decoder family. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node
from gangline_basics.model.attention_backend import AttentionBackend
from gangline_basics.model.decoder_nodes import AttentionNode, BlockNode, FeedForwardNode, NormNode

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.model.rope_rates import Rope

BIASED = LinearNode(bias=True)


class DecoderOptions(Protocol):
    """Options of a decoder that the functions of this module read; a model family may have more."""

    vocab_size: int
    dim: int
    layers: int
    heads: int
    ffn_dim: int
    tied: bool
    norm_eps: float
    z_loss: float
    init_std: float
    attention_backend: AttentionBackend

    @property
    def key_heads(self) -> int:
        """Number of key and value heads."""

    @property
    def head_width(self) -> int:
        """Width of a head."""

    def get_window(self, block: int) -> int | None:
        """Return the sliding window of a block in tokens, or None for full attention."""

    def get_rope(self, block: int, length: int) -> Rope | None:
        """Return the rotary position embedding of a block for rows of `length` tokens, or None."""


def get_length(run: Run | None) -> int:
    """Return the sequence length of the run in tokens, or 0 without a run."""
    return 0 if run is None else run.batch.sequence_length


def build_norm(config: DecoderOptions, offset: float = 0.0) -> NormNode:
    """Return a norm of the residual stream."""
    return NormNode(dim=config.dim, eps=config.norm_eps, offset=offset)


def build_attention(
    config: DecoderOptions, block: int, run: Run | None, kind: type[AttentionNode] = AttentionNode, **own: Any
) -> AttentionNode:
    """Return the attention of a block. kind: node class; own: further fields of the model family."""
    return kind(
        dim=config.dim,
        heads=config.heads,
        kv_heads=config.key_heads,
        head_dim=config.head_width,
        rope=config.get_rope(block, get_length(run)),
        window=config.get_window(block),
        backend=config.attention_backend,
        **own,
    )


def feed_forward_of(config: DecoderOptions, **own: Any) -> FeedForwardNode:
    """Return the gated feed-forward of every block. own: further fields of the model family."""
    return FeedForwardNode(dim=config.dim, ffn_dim=config.ffn_dim, **own)


def build_block(config: DecoderOptions, attention: Node, norm: Node | None = None, **own: Any) -> BlockNode:
    """Return a block with norms before attention and feed-forward. own: fields that replace the defaults."""
    norm = norm or build_norm(config)
    fields = {"attention_norm": norm, "feed_forward_norm": norm, "feed_forward": feed_forward_of(config)}
    return BlockNode(attention=attention, **fields | own)
