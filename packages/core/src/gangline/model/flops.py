"""Number of parameters and FLOPs per token of a model. Torch-free, for MFU and for planning.

The count is that of PaLM (Chowdhery et al., arXiv 2204.02311, appendix B): a training step takes 6 operations for each
weight that a token is multiplied with (2 forward, 4 backward) and 12·H·C·T for each layer's attention over T keys,
without a discount for causality and without recomputation. Looking up the embedding costs nothing; the head's matmul
counts, tied or not. A weight that is frozen takes 4: no gradient of it is computed.
"""

from __future__ import annotations

from math import prod

from gangline.model.tree import Node, get_parameter_shapes, iterate_nodes
from gangline.plan import Plan

BACKWARD_AND_FORWARD = 3  # the backward pass takes twice the forward pass: one matmul for the input, one for the weight


def count_parameters(tree: Node) -> int:
    """Return the number of parameters of the model, each tied one counted once."""
    return sum(prod(shape) for shape in get_parameter_shapes(tree).values())


def count_trained(tree: Node, plan: Plan) -> int:
    """Return the number of parameters that the plan does not freeze, each tied one counted once."""
    return sum(prod(shape) for name, shape in get_parameter_shapes(tree).items() if not plan.is_frozen(name))


def count_flops_per_token(tree: Node, sequence_length: int, plan: Plan) -> int:
    """Return the floating-point operations of one training token: 6N + 12·L·H·C·T for a dense decoder."""
    return sum(
        (BACKWARD_AND_FORWARD - computes_frozen(path, node, plan)) * node.count_flops(sequence_length)
        for path, node in iterate_nodes(tree)
    )


def computes_frozen(path: str, node: Node, plan: Plan) -> bool:
    """Return whether all matrices that the node at `path` multiplies with are frozen, its child nodes left out."""
    matrices = [f"{path}.{name}" if path else name for name, shape in node.get_shapes().items() if len(shape) > 1]
    return bool(matrices) and all(map(plan.is_frozen, matrices))
