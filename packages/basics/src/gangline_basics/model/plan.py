"""A decoder's tree of nodes, and its plan: sharding, initialization and names. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import sqrt
from typing import TYPE_CHECKING, Any

from gangline.model.linear_nodes import EmbeddingNode
from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes, map_paths
from gangline.plan import Init, Plan, Seam, ShardRule
from gangline_basics.model.decoder_nodes import DecoderNode, HeadNode, NormNode, SinksNode
from gangline_basics.model.decoder_tree import DecoderOptions, build_attention, build_block, build_norm
from gangline_basics.model.names import ModuleNames

if TYPE_CHECKING:
    from gangline.config.schema import Run
    from gangline_basics.model.config import DecoderConfig

DECODER_NAMES = ModuleNames()


def plan_decoder(config: DecoderConfig, run: Run | None = None) -> tuple[DecoderNode, Plan]:
    """Return the tree and the plan of a decoder, for any model part whose options derive from `DecoderConfig`."""
    head_norm = NormNode(dim=config.head_width, eps=config.norm_eps) if config.qk_norm else None
    own: dict[str, Any] = {
        "q_norm": head_norm,
        "k_norm": head_norm,
        "scale": config.attention_scale,
        "soft_cap": config.soft_cap,
        "sinks": SinksNode(heads=config.heads) if config.sinks else None,
    }
    return plan_family(config, lambda index: build_block(config, build_attention(config, index, run, **own)))


def plan_family(
    config: DecoderOptions,
    block: Callable[[int], Node],
    *,
    kind: type[DecoderNode] = DecoderNode,
    embed: Node | None = None,
    head: Node | None = None,
    norm: NormNode | None = None,
    names: ModuleNames = DECODER_NAMES,
    **own: tuple[Any, ...],
) -> tuple[DecoderNode, Plan]:
    """Return the tree and the plan of a decoder whose blocks are `block(index)`.

    embed, head, norm: nodes of the family that replace the decoder's embedding, head and last norm. own: rules of the
    family's modules (`Plan.extend`), which precede the rules of every decoder.
    """
    sizes = {"vocab_size": config.vocab_size, "dim": config.dim}
    tree = kind(
        embed=embed or EmbeddingNode(**sizes),
        blocks=tuple(block(index) for index in range(config.layers)),
        head=head or HeadNode(**sizes, norm=norm or build_norm(config), z=config.z_loss),
        tied=config.tied,
    )
    return tree, _plan_of(config, tree, names, own)


def _plan_of(config: DecoderOptions, tree: DecoderNode, names: ModuleNames, own: dict[str, tuple[Any, ...]]) -> Plan:
    """Return the plan: how the tree is sharded (Shoeybi et al., arXiv 1909.08053, section 3), initialized and named.

    Matrices are drawn with std `init_std`; matrices that write to the residual stream are drawn with std
    init_std / sqrt(2 · layers), so that the stream's variance does not grow with depth (GPT-2, section 2.3). Norms are
    initialized to the identity, biases and sinks to 0. Rules that match no parameter of the tree are dropped.
    """
    head, shapes, nodes = config.head_width, get_parameter_shapes(tree), map_paths(tree)
    layers = [nodes[f"blocks.{index}.attention"] for index in range(config.layers)]
    over_heads = {f"blocks.*.attention.{n}" for n in ("q_norm", "k_norm") if any(getattr(x, n, None) for x in layers)}
    plan = Plan(
        embed="embed",
        blocks="blocks",
        head="head",
        layers=config.layers,
        sharding=(
            ShardRule("embed.weight", 0),
            ShardRule("embed.tokens.weight", 0),
            ShardRule.colwise("blocks.*.attention.wq", head),
            ShardRule.colwise("blocks.*.attention.wk", head),
            ShardRule.colwise("blocks.*.attention.wv", head),
            ShardRule.rowwise("blocks.*.attention.wo", head),
            ShardRule("blocks.*.attention.sinks", 0),
            ShardRule.colwise("blocks.*.feed_forward.w_gate"),
            ShardRule.colwise("blocks.*.feed_forward.w_up"),
            ShardRule.rowwise("blocks.*.feed_forward.w_down"),
            ShardRule("head.weight", 0),
        ),
        inits=(
            *dict.fromkeys(_iterate_constants(tree)),
            *_iterate_draws(config.init_std, config.init_std / sqrt(2 * config.layers)),
        ),
        names=names.list_rules((*shapes, *tree.get_ties())),
        tied=tuple(tree.get_ties().items()),
        seams=(Seam("attention", "blocks.*.attention"), Seam("loss", "head")),
        partial_grad=tuple(sorted(over_heads - {rule.pattern for rule in own.get("sharding", ())})),
        facts={
            "layers": config.layers,
            "dim": config.dim,
            "heads": config.heads,
            "kv_heads": config.key_heads,
            "head_dim": head,
            "ffn_dim": config.ffn_dim,
            "vocab_size": config.vocab_size,
        },
    ).extend(**own)
    unmatched = set(plan.find_unmatched(shapes))
    return replace(
        plan,
        sharding=tuple(rule for rule in plan.sharding if rule.pattern not in unmatched),
        inits=tuple(init for init in plan.inits if init.pattern not in unmatched),
    )


def _iterate_constants(tree: DecoderNode) -> Iterator[Init]:
    """Yield the rules of parameters that are initialized to a constant."""
    for path, node in iterate_nodes(tree):
        pattern = re.sub(r"^blocks\.\d+\.", "blocks.*.", path)
        if "bias" in node.get_shapes():
            yield Init(f"{pattern}.bias", "constant", 0.0)
        if isinstance(node, SinksNode):
            yield Init(f"{pattern}.weight", "constant", 0.0)
        if isinstance(node, NormNode):
            yield Init(f"{pattern}.weight", "constant", 1.0 - node.offset)


def _iterate_draws(std: float, residual: float) -> Iterator[Init]:
    """Yield the rules of randomly initialized parameters. residual: std of the residual outputs."""
    yield Init("embed", "normal", std)
    yield Init("blocks.*.attention.wo", "normal", residual)
    yield Init("blocks.*.feed_forward.w_down", "normal", residual)
    yield Init("blocks.*.attention", "normal", std)
    yield Init("blocks.*.feed_forward", "normal", std)
    yield Init("head.weight", "normal", std)
