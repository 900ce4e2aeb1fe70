"""Model edits with one fault each, otherwise equal to the toy `lanes`."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields, replace
from typing import ClassVar

from gangline.model.calls import AttentionCall
from gangline.model.tree import iterate_nodes, replace_node
from gangline.plan import Init, ShardRule
from gangline_basics.model.decoder_nodes import AttentionNode, FeedForwardNode
from gangline_testkit.toys.plugin import LanesNode, edit_lanes


def edited(tree, plan, options):
    """Apply the edit of the toy `lanes`."""
    return edit_lanes(tree, plan, options)


def InPlace(tree, plan, options):
    plan.facts["lanes"] = options.lanes
    return edited(tree, plan, options)


def ClaimsNothing(tree, plan, options):
    tree, plan, _ = edited(tree, plan, options)
    return tree, plan, []


def NoInit(tree, plan, options):
    tree, plan, claimed = edited(tree, plan, options)
    inits = tuple(init for init in plan.inits if not init.pattern.endswith("feed_forward"))
    return tree, replace(plan, inits=inits), claimed


def DeadPattern(tree, plan, options):
    tree, plan, claimed = edited(tree, plan, options)
    return tree, plan.extend(sharding=(ShardRule("blocks.*.feed_forward.w_inn", 0, "lane"),)), claimed


@dataclass(frozen=True, kw_only=True)
class OwnLanesNode(LanesNode):
    module: ClassVar[str] = "broken_modules:OwnLanesModule"


def OwnLanes(tree, plan, options):
    """Replace the lanes by modules that do not sum their outputs over the ranks of a fold."""
    tree, plan, claimed = edited(tree, plan, options)
    for path in claimed:
        node = dict(iterate_nodes(tree))[path]
        own = OwnLanesNode(dim=node.dim, lanes=node.lanes, width=node.width, penalty=node.penalty)
        tree = replace_node(tree, path, own)
    return tree, plan, claimed


@dataclass(frozen=True, kw_only=True)
class BoastingNode(AttentionNode):
    module: ClassVar[str] = "gangline_basics.model.attention:Attention"

    def get_seams(self):
        return {"attention": AttentionCall(window=3)}


def Boasts(tree, plan, options):
    """Give plain attention a node that states a window of 3."""
    tree, plan, claimed = edited(tree, plan, options)
    node = tree.blocks[0].attention
    sizes = {name: getattr(node, name) for name in ("dim", "heads", "kv_heads", "head_dim", "q_norm", "k_norm")}
    tree = replace_node(tree, "blocks.0.attention", BoastingNode(**sizes))
    return tree, plan, [*claimed, "blocks.0.attention"]


@dataclass(frozen=True, kw_only=True)
class SwapsAttentionNode(AttentionNode):
    module: ClassVar[str] = "broken_modules:SwapsAttentionModule"


def SwapsAttention(tree, plan, options):
    """Use another attention function, without a node that states its call."""
    claimed = [path for path, node in iterate_nodes(tree) if isinstance(node, AttentionNode)]
    for path in claimed:
        node = dict(iterate_nodes(tree))[path]
        tree = replace_node(tree, path, SwapsAttentionNode(**{i.name: getattr(node, i.name) for i in fields(node)}))
    return tree, plan, claimed


@dataclass(frozen=True, kw_only=True)
class OwnTokensNode(FeedForwardNode):
    module: ClassVar[str] = "broken_modules:OwnTokensModule"


@dataclass(frozen=True, kw_only=True)
class ConfigSizesNode(FeedForwardNode):
    module: ClassVar[str] = "broken_modules:ConfigSizesModule"


@dataclass(frozen=True, kw_only=True)
class UndeclaredPartialNode(FeedForwardNode):
    module: ClassVar[str] = "broken_modules:UndeclaredPartialModule"

    def get_shapes(self):
        return {**super().get_shapes(), "gain": (1,)}


@dataclass(frozen=True, kw_only=True)
class RemembersNode(FeedForwardNode):
    module: ClassVar[str] = "broken_modules:RemembersModule"


@dataclass(frozen=True, kw_only=True)
class ShiftsNode(FeedForwardNode):
    module: ClassVar[str] = "broken_modules:ShiftsModule"

    def get_decoding(self):
        return "tokenwise"


@dataclass(frozen=True, kw_only=True)
class LowRankNode(FeedForwardNode):
    module: ClassVar[str] = "broken_modules:LowRankModule"

    def get_shapes(self):
        return {**super().get_shapes(), "a": (2, self.dim), "b": (self.dim, 2)}


@dataclass(frozen=True, kw_only=True)
class IdleNode(UndeclaredPartialNode):
    module: ClassVar[str] = "broken_modules:IdleModule"


def _in_place_of_feed_forwards(tree, plan, cls):
    claimed = [path for path, node in iterate_nodes(tree) if isinstance(node, FeedForwardNode)]
    for path in claimed:
        node = dict(iterate_nodes(tree))[path]
        tree = replace_node(tree, path, cls(**{item.name: getattr(node, item.name) for item in fields(node)}))
    return tree, plan, claimed


def OwnTokens(tree, plan, options):
    """Divide by a norm over the local tokens instead of the complete sequence."""
    return _in_place_of_feed_forwards(tree, plan, OwnTokensNode)


def ConfigSizes(tree, plan, options):
    """Use modules that take their width from the node, not from the local tensor."""
    return _in_place_of_feed_forwards(tree, plan, ConfigSizesNode)


def UndeclaredPartial(tree, plan, options):
    """Multiply features that tp shards by a replicated parameter, which the plan omits from `partial_grad`."""
    tree, plan, claimed = _in_place_of_feed_forwards(tree, plan, UndeclaredPartialNode)
    return tree, plan.extend(inits=(Init("blocks.*.feed_forward.gain", "constant", 0.5),)), claimed


def LowRank(tree, plan, options):
    """Add a low-rank update to each feed-forward; one factor starts at zero. This edit is correct."""
    tree, plan, claimed = _in_place_of_feed_forwards(tree, plan, LowRankNode)
    place = "blocks.*.feed_forward"
    return tree, plan.extend(inits=(Init(f"{place}.a", "normal", 0.1), Init(f"{place}.b", "constant", 0.0))), claimed


def Idle(tree, plan, options):
    """Add a parameter that no computation uses."""
    tree, plan, claimed = _in_place_of_feed_forwards(tree, plan, IdleNode)
    return tree, plan.extend(inits=(Init("blocks.*.feed_forward.gain", "constant", 0.5),)), claimed


def Remembers(tree, plan, options):
    """Pass outputs from one block to the next through a class attribute."""
    return _in_place_of_feed_forwards(tree, plan, RemembersNode)


def Shifts(tree, plan, options):
    """Use modules that claim to be tokenwise and add the output of the previous token."""
    return _in_place_of_feed_forwards(tree, plan, ShiftsNode)


def Dice(tree, plan, options):
    """Draw a random width in each call."""
    return edited(tree, plan, replace(options, width=random.randrange(4, 4000)))


def Heavy(tree, plan, options):
    import torch

    return edited(tree, plan, replace(options, width=int(torch.tensor(8))))
