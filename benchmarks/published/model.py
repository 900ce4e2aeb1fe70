"""Build the model of a published row: its shapes, and the modules that differ from the decoder of basics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from gangline.config import Run
from gangline.model.compose import compose_model
from gangline.model.tree import Node, map_paths, replace_node
from gangline.plan import Plan, ShardRule
from gangline.plugin.registry import installed
from gangline_basics.model.decoder_nodes import AttentionNode, FeedForwardNode
from published.hybrids import as_hybrid
from published.nodes import GeluNode, LatentAttentionNode
from published.row import Row, Unjudged
from published.shapes import Shapes, shapes_of

LATENT = {"query_rank": 1536, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}  # of DeepSeek-V3


def model_of(row: Row) -> Shapes:
    """Return the shapes of a row's model. Raises Unjudged if the row neither names a known model nor describes one."""
    known = shapes_of(str(row.get("model") or ""))
    if known is None:
        return _described(row)
    if not row.get("layers"):
        return known
    layers, moe = row.whole("layers"), known.moe
    if layers < known.model["layers"] and moe.get("first"):
        # SimuMax truncates the model like this (docs/b200/b200_release_v1.2_summary.md: dense_layers=1)
        moe = {**moe, "first": 1}
    return replace(known, model={**known.model, "layers": layers}, moe=moe)


def _described(row: Row) -> Shapes:
    """Return a dense decoder with the sizes of the row; a GPT if the row has only width, layers and heads."""
    if not all(row.get(name) for name in ("hidden", "layers", "heads")):
        raise Unjudged(f"shapes of {row.get('model') or 'a model without a name'} are not known")
    if row.get("experts"):
        raise Unjudged("the shapes of its experts are not known")
    dim, heads, gelu = row.whole("hidden"), row.whole("heads"), not row.get("ffn")
    sizes = {
        "dim": dim,
        "layers": row.whole("layers"),
        "heads": heads,
        "kv_heads": row.whole("kv_heads", heads),
        "ffn_dim": 4 * dim if gelu else row.whole("ffn"),
        "vocab_size": row.whole("vocab", 51_200),
        "tied": bool(row.get("tied", gelu)),
    }
    return Shapes(sizes, gelu=gelu)


def experts_of(options: Mapping[str, Any], row: Row) -> Any:
    """Return the options of the model edit `moe`. Raises Unjudged if the edit is not installed."""
    offers = installed().get_offers("moe")
    if "on" not in offers:
        raise Unjudged("gangline-moe is not installed")
    config = offers["on"].part.config
    names = {item.name for item in fields(config)}
    # ep takes tp ranks too, so tp shards no expert
    given = {**options, "ep": row.whole("ep", 1), "ep_axes": ["dp_shard", "cp", "tp"]}
    return config(**{name: value for name, value in given.items() if name in names})


def modules_of(run: Run, shapes: Shapes) -> tuple[Node, Plan]:
    """Return the model tree of a row's model, and its sharding plan."""
    tree, plan = compose_model(run)
    if shapes.latent:  # tp shards the heads; the latents of keys and values are replicated
        at = f"{plan.blocks}.*.attention"
        plan = plan.extend(
            sharding=(ShardRule.colwise(f"{at}.wq_b"), ShardRule.colwise(f"{at}.wkv_b"), ShardRule.rowwise(f"{at}.wo"))
        )
    nodes = map_paths(tree)
    made: dict[Node, Node] = {}
    for path in (f"{plan.blocks}.{index}" for index in range(plan.layers)):
        block = nodes[path]
        if block not in made:
            made[block] = _block(block, shapes)
        if made[block] is not block:
            tree = replace_node(tree, path, made[block])
    return as_hybrid(tree, plan, shapes.hybrid) if shapes.hybrid else (tree, plan)


def _block(block: Node, shapes: Shapes) -> Node:
    attention, feed_forward = (getattr(block, name, None) for name in ("attention", "feed_forward"))
    if shapes.latent and isinstance(attention, AttentionNode):
        latent = LatentAttentionNode(dim=attention.dim, heads=attention.heads, **LATENT)
        block = replace_node(block, "attention", latent)
    if shapes.gelu and isinstance(feed_forward, FeedForwardNode):
        block = replace_node(block, "feed_forward", GeluNode(dim=feed_forward.dim, ffn_dim=feed_forward.ffn_dim))
    return block
