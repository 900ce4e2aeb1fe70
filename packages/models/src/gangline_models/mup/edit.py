"""Maximal update parametrisation (muP) for Adam (Yang et al., arXiv 2203.03466, table 8). Torch-free and pure.

With m = width / base width, and learning rates in `optimizer.lr_multipliers` (see `config`):

    matrices of the blocks   standard deviation of initial weights times 1/sqrt(m), learning rate times 1/m
    logits                   times 1/m; weights and learning rate of the head unchanged
    embedding, norms         unchanged
    attention scores         q·k / head width instead of its square root; equal at the base width (section 4)

The magnitude of activations, and of their change per step, then does not depend on the width.
"""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

from gangline import UserError
from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes, map_paths, replace_node
from gangline.plan import Plan, matches
from gangline_basics.model.decoder_nodes import AttentionNode, HeadNode
from gangline_models.mup.config import Mup


def edit(tree: Node, plan: Plan, options: Mup) -> tuple[Node, Plan, list[str]]:
    """Scale logits, attention scores and initial weights. Raises UserError if the head is not of gangline-basics."""
    wider = plan.facts["dim"] / options.base_dim
    nodes = dict(iterate_nodes(tree))
    head = map_paths(tree).get(plan.head)
    if not isinstance(head, HeadNode):
        why = "mup does not support other edits of the head, such as mtp or dpo."
        raise UserError("mup=on does not support the head of this model.", why, "mup=off, or another model.")
    tree = replace_node(tree, plan.head, replace(head, scale=head.scale / wider))
    claimed = [plan.head]
    for path, node in nodes.items():
        if isinstance(node, AttentionNode):
            base = options.base_head_dim or node.head_dim
            scale = (node.scale or 1 / sqrt(base)) * base / node.head_dim
            tree = replace_node(tree, path, replace(node, scale=scale))
            claimed.append(path)
    matrices = [
        name
        for name, shape in get_parameter_shapes(tree).items()
        if len(shape) >= 2 and name.startswith(f"{plan.blocks}.")
    ]
    inits = tuple(
        replace(init, scale=init.scale / sqrt(wider))
        if init.distribution != "constant" and any(matches(init.pattern, name) for name in matrices)
        else init
        for init in plan.inits
    )
    return tree, replace(plan, inits=inits), claimed
