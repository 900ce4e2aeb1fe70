"""Model edit `moe`: replaces feed-forward nodes by MoE layers. Torch-free and pure."""

from __future__ import annotations

import re
from dataclasses import replace

from gangline import UserError
from gangline.model.linear_nodes import LinearNode
from gangline.model.tree import Node, iterate_nodes, replace_node
from gangline.plan import Fold, Init, Plan, ShardRule, matches
from gangline.plugin.registry import installed, load
from gangline_basics.model.decoder_nodes import AttentionNode, FeedForwardNode
from gangline_moe.config import FOLD, MoeOptions
from gangline_moe.interop.names import list_expert_names
from gangline_moe.nodes import ExpertsNode, MoeNode, StackNode
from gangline_moe.routers.config import Biased

LINEARS = ("w_gate", "w_up", "w_down")


def edit(tree: Node, plan: Plan, options: MoeOptions) -> tuple[Node, Plan, list[str]]:
    """Replace the feed-forwards of the chosen blocks by MoE layers; return tree, plan and the replaced paths.

    Raises UserError if the model has no feed-forward to replace, or if it has features that experts do not support.
    """
    feed_forwards = {path: node for path, node in iterate_nodes(tree) if isinstance(node, FeedForwardNode)}
    moe_paths = [path for path in feed_forwards if _has_experts(_find_block(path, plan), options)]
    if not moe_paths:
        raise explain_refusal(feed_forwards, plan, options)
    if other := {word for path in moe_paths for word in _list_unsupported(feed_forwards[path])}:
        raise UserError(
            f"moe does not support feed-forwards with {', '.join(sorted(other))}, which this model has.",
            "The experts of moe are SwiGLU feed-forwards.",
            "Choose another model, or moe=off.",
        )
    for path in moe_paths:
        tree = replace_node(tree, path, make_layer_node(feed_forwards[path], options))
    dense_paths = set(feed_forwards) - set(moe_paths)
    qk_norm = any(isinstance(node, AttentionNode) and node.q_norm is not None for _, node in iterate_nodes(tree))
    example = feed_forwards[moe_paths[0]]
    biased = [name for name in LINEARS if _has_bias(example, name)]
    options = replace(options, ffn_dim=options.ffn_dim or max(1, example.ffn_dim // options.top_k))
    return tree, extend_plan(plan, moe_paths, dense_paths, options, qk_norm, biased), moe_paths


def _list_unsupported(node: FeedForwardNode) -> list[str]:
    """Return the features of the feed-forward that experts do not support."""
    features = [] if node.gating.activation == "silu" else [node.gating.activation]
    return features + ([] if type(node).module == FeedForwardNode.module else [type(node).__name__])


def _find_block(path: str, plan: Plan) -> int:
    """Return the index of the block that contains the node at `path`; -1 for a node outside the blocks."""
    inside = re.match(re.escape(plan.blocks) + r"\.(\d+)(\.|$)", path)
    return int(inside[1]) if inside else -1


def _has_experts(block: int, options: MoeOptions) -> bool:
    return block >= options.first and (block - options.first) % options.every == 0


def explain_refusal(found: dict[str, FeedForwardNode], plan: Plan, options: MoeOptions) -> UserError:
    """Return the error that explains why no feed-forward can be replaced."""
    if not found:
        return UserError(
            "moe found no gated feed-forward layer to replace in this model.",
            "The edit moe replaces gated feed-forward layers by layers with experts.",
            "Choose another model, or moe=off.",
        )
    return UserError(
        f"moe.first={options.first} leaves no block with experts.",
        f"The model has {plan.layers} blocks, counted from 0.",
        f"Choose moe.first from 0 to {plan.layers - 1}.",
    )


def make_layer_node(dense: FeedForwardNode, options: MoeOptions) -> MoeNode:
    """Return the MoE layer that replaces `dense`."""
    hidden = options.ffn_dim or max(1, dense.ffn_dim // options.top_k)
    build = load(installed().find_part(options.router).part.build)
    router = build(options.router, dim=dense.dim, experts=options.experts, top_k=options.top_k)
    stacks = {name: StackNode(bias=_has_bias(dense, name)) for name in LINEARS}
    experts = ExpertsNode(
        dim=dense.dim, ffn_dim=hidden, experts=options.experts, top_k=options.top_k, gating=dense.gating, **stacks
    )
    shared_experts = None
    if options.shared:
        linears = {name: LinearNode(bias=_has_bias(dense, name)) for name in LINEARS}
        shared_experts = FeedForwardNode(dim=dense.dim, ffn_dim=options.shared * hidden, gating=dense.gating, **linears)
    return MoeNode(
        router=router,
        experts=experts,
        shared=shared_experts,
        shared_gate=LinearNode(in_features=dense.dim, out_features=1) if options.shared_gate else None,
        capacity_factor=options.capacity_factor,
        ranks_per_node=options.ranks_per_node,
    )


def _has_bias(dense: FeedForwardNode, name: str) -> bool:
    linear = getattr(dense, name)
    return isinstance(linear, LinearNode) and linear.bias


def extend_plan(
    plan: Plan, chosen: list[str], left: set[str], options: MoeOptions, qk_norm: bool, biased: list[str]
) -> Plan:
    """Return the plan with rules for MoE layers before the model's rules, without rules that no longer match."""
    example = chosen[0]
    rules = {name: plan.init(f"{example}.{name}.weight") for name in LINEARS}
    for place in sorted({_make_pattern(path) for path in chosen}):
        if not any(matches(place, path) for path in left):
            plan = _remove_rules(plan, place)
        inits = [Init(f"{place}.*.{name}.bias", "constant", 0.0) for name in biased]
        inits += [Init(f"{place}.router.gate.bias", "constant", 0.0)] * isinstance(options.router, Biased)
        inits += [replace(rule, pattern=f"{place}.experts.{name}") for name, rule in rules.items()]
        inits.append(replace(rules["w_gate"], pattern=f"{place}.router.gate"))
        sharding = [ShardRule(f"{place}.experts", 0, FOLD)]
        if options.shared:
            inits += [replace(rule, pattern=f"{place}.shared.{name}") for name, rule in rules.items()]
            sharding += [ShardRule.colwise(f"{place}.shared.{name}") for name in LINEARS[:2]]
            sharding.append(ShardRule.rowwise(f"{place}.shared.w_down"))
        if options.shared_gate:
            inits.append(replace(rules["w_gate"], pattern=f"{place}.shared_gate"))
        if options.router.bias_rate:
            inits.append(Init(f"{place}.router.bias", "constant", 0.0))
        if options.router.global_aux_loss:
            inits.append(Init(f"{place}.router.share", "constant", 1 / options.experts))
        names = list_expert_names(place, options, qk_norm, biased)
        plan = plan.extend(inits=tuple(inits), sharding=tuple(sharding), names=names, master_dtype=(f"{place}.router",))
    return plan.extend(folds=(Fold(FOLD, options.ep or 1, tuple(options.ep_axes)),))


def _make_pattern(path: str) -> str:
    """Return the path with `*` for each number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


def _remove_rules(plan: Plan, place: str) -> Plan:
    return replace(
        plan,
        sharding=tuple(rule for rule in plan.sharding if not matches(place, rule.pattern)),
        inits=tuple(init for init in plan.inits if not matches(place, init.pattern)),
        names=tuple(name for name in plan.names if not matches(place, name.pattern)),
    )
