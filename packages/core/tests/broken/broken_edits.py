"""Model edits that are wrong in one way each. All are the toy `lanes` but for that."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import ClassVar

from gangline.model.calls import AttentionCall
from gangline.model.tree import AttentionNode, nodes, replaced
from gangline.plan import Cut
from gangline.testing.toys.plugin import LanesNode, edit_lanes


def edited(tree, plan, options):
    """The plan's patterns say "lane" and "feed_forward" as the toy's do."""
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
    return tree, plan.extended(cuts=(Cut("blocks.*.feed_forward.w_inn", 0, "lane"),)), claimed


@dataclass(frozen=True, kw_only=True)
class OwnLanesNode(LanesNode):
    module: ClassVar[str] = "broken_modules:OwnLanesModule"


def OwnLanes(tree, plan, options):
    """The ranks of a fold never add up their lanes."""
    tree, plan, claimed = edited(tree, plan, options)
    for path in claimed:
        node = dict(nodes(tree))[path]
        own = OwnLanesNode(dim=node.dim, lanes=node.lanes, width=node.width, penalty=node.penalty)
        tree = replaced(tree, path, own)
    return tree, plan, claimed


@dataclass(frozen=True, kw_only=True)
class BoastingNode(AttentionNode):
    module: ClassVar[str] = "gangline.model.attention:Attention"

    def seams(self):
        return {"attention": AttentionCall(window=3)}


def Boasts(tree, plan, options):
    """Says of plain attention that it has a window."""
    tree, plan, claimed = edited(tree, plan, options)
    node = tree.blocks[0].attention
    sizes = {name: getattr(node, name) for name in ("dim", "heads", "kv_heads", "head_dim", "q_norm", "k_norm")}
    tree = replaced(tree, "blocks.0.attention", BoastingNode(**sizes))
    return tree, plan, [*claimed, "blocks.0.attention"]


def Dice(tree, plan, options):
    """Another width each time."""
    return edited(tree, plan, replace(options, width=random.randrange(4, 4000)))


def Heavy(tree, plan, options):
    import torch

    return edited(tree, plan, replace(options, width=int(torch.tensor(8))))
