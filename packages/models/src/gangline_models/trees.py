"""From a family's options to nodes, where families agree. Torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gangline.model.linear_nodes import EmbeddingNode, LinearNode
from gangline.model.tree import Node
from gangline_basics.model.decoder_nodes import AttentionNode, DecoderNode, FeedForwardNode, HeadNode, NormNode

if TYPE_CHECKING:
    from gangline.config import Run
    from gangline_models.families.base import FamilyConfig

BIASED = LinearNode(bias=True)


def length_of(run: Run | None) -> int:
    """Tokens of a row of the run; 0 where there is no run."""
    return 0 if run is None else run.batch.sequence_length


def norm_of(config: FamilyConfig, offset: float = 0.0) -> NormNode:
    """A norm of the residual stream."""
    return NormNode(dim=config.dim, eps=config.norm_eps, offset=offset)


def attention_of(config: FamilyConfig, block: int, run: Run | None, **more: Any) -> AttentionNode:
    """The attention of a block; more: what the family has beside."""
    return AttentionNode(
        dim=config.dim,
        heads=config.heads,
        kv_heads=config.key_heads,
        head_dim=config.head_width,
        rope=config.rope_of(block, length_of(run)),
        window=config.window_of(block),
        **more,
    )


def feed_forward_of(config: FamilyConfig, **more: Any) -> FeedForwardNode:
    """The gated feed-forward of every block."""
    return FeedForwardNode(dim=config.dim, hidden=config.hidden, **more)


def decoder_of(
    config: FamilyConfig,
    blocks: tuple[Node, ...],
    *,
    embed: Node | None = None,
    head: Node | None = None,
    norm: NormNode | None = None,
) -> DecoderNode:
    """The whole tree; with core's embedding and head where a family has no other, and the last norm likewise."""
    return DecoderNode(
        embed=embed or EmbeddingNode(vocab_size=config.vocab_size, dim=config.dim),
        blocks=blocks,
        head=head
        or HeadNode(vocab_size=config.vocab_size, dim=config.dim, norm=norm or norm_of(config), z=config.z_loss),
        tied=config.tied,
    )
