"""A decoder's tree of nodes, and its plan: how it may be cut, drawn and named. Torch-free."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from gangline.config.schema import Run
from gangline.model.linear_nodes import EmbeddingNode
from gangline.plan import Cut, Init, Name, Plan, Seam
from gangline_basics.model.config import DecoderConfig
from gangline_basics.model.decoder_nodes import (
    AttentionNode,
    BlockNode,
    DecoderNode,
    FeedForwardNode,
    HeadNode,
    NormNode,
    SinksNode,
)
from gangline_basics.model.rope_rates import BandScaling, Rope, RopeScaling


def plan_decoder(config: DecoderConfig, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """The build of every decoder-shaped model part."""
    tree = tree_of(config)
    return tree, plan_of(config, tree)


def tree_of(config: DecoderConfig) -> DecoderNode:
    """The nodes, block by block, so that an edit can replace one of them."""
    norm = NormNode(dim=config.dim, eps=config.norm_eps)
    head_norm = NormNode(dim=config.head_width, eps=config.norm_eps) if config.qk_norm else None
    attention = AttentionNode(
        dim=config.dim,
        heads=config.heads,
        kv_heads=config.key_heads,
        head_dim=config.head_width,
        rope=Rope(config.rope_theta, _scaling(config)),
        q_norm=head_norm,
        k_norm=head_norm,
        scale=config.attention_scale,
        soft_cap=config.soft_cap,
        sinks=SinksNode(heads=config.heads) if config.sinks else None,
    )
    block = BlockNode(
        attention_norm=norm,
        attention=attention,
        feed_forward_norm=norm,
        feed_forward=FeedForwardNode(dim=config.dim, hidden=config.hidden),
    )
    return DecoderNode(
        embed=EmbeddingNode(vocab_size=config.vocab_size, dim=config.dim),
        blocks=tuple(
            replace(block, attention=replace(attention, window=config.window_of(index)))
            for index in range(config.layers)
        ),
        head=HeadNode(vocab_size=config.vocab_size, dim=config.dim, norm=norm, z=config.z_loss),
        tied=config.tied,
    )


def _scaling(config: DecoderConfig) -> RopeScaling | None:
    if config.rope_scaling_factor is None:
        return None
    return BandScaling(
        config.rope_scaling_factor,
        config.rope_low_freq_factor,
        config.rope_high_freq_factor,
        config.rope_original_max_position,
    )


def plan_of(config: DecoderConfig, tree: DecoderNode) -> Plan:
    """How the decoder may be cut (Shoeybi et al., arXiv 1909.08053, section 3), drawn and named.

    Matrices are drawn with std `init_std`; the two of a block that write to the residual stream with
    1 / sqrt(2 · layers) of it, so that the stream's variance does not grow with depth (GPT-2, section 2.3).
    """
    head, qk = config.head_width, config.qk_norm
    residual = config.init_std / sqrt(2 * config.layers)
    return Plan(
        embed="embed",
        blocks="blocks",
        head="head",
        layers=config.layers,
        cuts=(
            Cut("embed.weight", 0),
            Cut.colwise("blocks.*.attention.wq", head),
            Cut.colwise("blocks.*.attention.wk", head),
            Cut.colwise("blocks.*.attention.wv", head),
            Cut.rowwise("blocks.*.attention.wo", head),
            *((Cut("blocks.*.attention.sinks", 0),) if config.sinks else ()),
            Cut.colwise("blocks.*.feed_forward.w_gate"),
            Cut.colwise("blocks.*.feed_forward.w_up"),
            Cut.rowwise("blocks.*.feed_forward.w_down"),
            Cut("head.weight", 0),
        ),
        inits=(
            Init("embed.weight", "normal", config.init_std),
            *(
                (Init("blocks.*.attention.q_norm", "constant"), Init("blocks.*.attention.k_norm", "constant"))
                if qk
                else ()
            ),
            *((Init("blocks.*.attention.sinks", "constant", 0.0),) if config.sinks else ()),
            Init("blocks.*.attention.wo", "normal", residual),
            Init("blocks.*.attention", "normal", config.init_std),
            Init("blocks.*.feed_forward.w_down", "normal", residual),
            Init("blocks.*.feed_forward", "normal", config.init_std),
            Init("blocks.*.attention_norm", "constant"),
            Init("blocks.*.feed_forward_norm", "constant"),
            Init("head.norm", "constant"),
            Init("head.weight", "normal", config.init_std),
        ),
        names=NAMES + (QK_NAMES if qk else ()) + (SINK_NAMES if config.sinks else ()),
        tied=tuple(tree.ties().items()),
        seams=(Seam("attention", "blocks.*.attention"), Seam("loss", "head")),
        partial_grad=("blocks.*.attention.q_norm", "blocks.*.attention.k_norm") if qk else (),
        facts={
            "layers": config.layers,
            "dim": config.dim,
            "heads": config.heads,
            "kv_heads": config.key_heads,
            "head_dim": head,
            "hidden": config.hidden,
            "vocab_size": config.vocab_size,
        },
    )


# As LlamaForCausalLM and Qwen3ForCausalLM name them.
NAMES = (
    Name("embed.weight", "model.embed_tokens.weight"),
    Name("blocks.*.attention_norm.weight", "model.layers.{0}.input_layernorm.weight"),
    Name("blocks.*.attention.wq.weight", "model.layers.{0}.self_attn.q_proj.weight"),
    Name("blocks.*.attention.wk.weight", "model.layers.{0}.self_attn.k_proj.weight"),
    Name("blocks.*.attention.wv.weight", "model.layers.{0}.self_attn.v_proj.weight"),
    Name("blocks.*.attention.wo.weight", "model.layers.{0}.self_attn.o_proj.weight"),
    Name("blocks.*.feed_forward_norm.weight", "model.layers.{0}.post_attention_layernorm.weight"),
    Name("blocks.*.feed_forward.w_gate.weight", "model.layers.{0}.mlp.gate_proj.weight"),
    Name("blocks.*.feed_forward.w_up.weight", "model.layers.{0}.mlp.up_proj.weight"),
    Name("blocks.*.feed_forward.w_down.weight", "model.layers.{0}.mlp.down_proj.weight"),
    Name("head.norm.weight", "model.norm.weight"),
    Name("head.weight", "lm_head.weight"),
)
QK_NAMES = (
    Name("blocks.*.attention.q_norm.weight", "model.layers.{0}.self_attn.q_norm.weight"),
    Name("blocks.*.attention.k_norm.weight", "model.layers.{0}.self_attn.k_norm.weight"),
)
# As GptOssForCausalLM names them.
SINK_NAMES = (Name("blocks.*.attention.sinks.weight", "model.layers.{0}.self_attn.sinks"),)
