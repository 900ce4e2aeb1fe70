"""Number of parameters and FLOPs per token of a model. Torch-free, for MFU and for planning.

The count follows PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): per token, a training step takes 6 FLOPs for
each weight in a matmul (2 forward, 4 backward) and 12·H·C·T for each layer's attention over T keys, without a discount
for causality and without recomputation. An embedding lookup counts 0; the head's matmul counts, tied or not. A frozen
weight takes 4 FLOPs, because its gradient is not computed.
"""

from __future__ import annotations

from math import prod

from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes
from gangline.plan import Plan

BACKWARD_AND_FORWARD = 3  # multiple of the forward FLOPs; the backward pass has two matmuls: input and weight gradient


def count_parameters(tree: Node) -> int:
    """Return the number of parameters of the model; a tied parameter counts once."""
    return sum(prod(shape) for shape in get_parameter_shapes(tree).values())


def count_trained(tree: Node, plan: Plan) -> int:
    """Return the number of parameters that the plan does not freeze; a tied parameter counts once."""
    return sum(prod(shape) for name, shape in get_parameter_shapes(tree).items() if not plan.is_frozen(name))


def count_flops_per_token(tree: Node, sequence_length: int, plan: Plan) -> int:
    """Return the FLOPs of a training step per token: 6N + 12·L·H·C·T for a dense decoder."""
    return sum(
        (BACKWARD_AND_FORWARD - computes_frozen(path, node, plan)) * node.count_flops(sequence_length)
        for path, node in iterate_nodes(tree)
    )


def computes_frozen(path: str, node: Node, plan: Plan) -> bool:
    """Return whether all matrices of the node at `path`, without child nodes, are frozen; False without matrices."""
    matrices = [f"{path}.{name}" if path else name for name, shape in node.get_shapes().items() if len(shape) > 1]
    return bool(matrices) and all(map(plan.is_frozen, matrices))
