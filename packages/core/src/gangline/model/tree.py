"""Tree of frozen config nodes that describes a model, and functions to iterate over it. Torch-free.

Each node names the class of its module, so a plugin's node needs no entry in a table. The path of a node in the
tree ("blocks.3.feed_forward") is the name of the module in the model. A model edit replaces nodes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import ClassVar, Literal

from gangline.model.calls import Call
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.matmuls import AnyMatmul, list_matmuls

Shape = tuple[int, ...]
Decoding = Literal["tokenwise", "cached"]


@dataclass(frozen=True, kw_only=True)
class Node(ABC):
    """One module as data."""

    module: ClassVar[str]  # "package.module:Class" of the module, whose constructor takes the node as its only argument

    def get_shapes(self) -> dict[str, Shape]:
        """Return name -> global shape of the parameters of this node's module, without parameters of child nodes."""
        return {}

    def count_flops(self, sequence_length: int) -> int:
        """Return the floating-point operations (FLOPs) of the module's forward pass per token, without child nodes.

        By default two for each element of a parameter of two or more dims: every token takes part in one matmul with
        it. Override for a module that computes something else.
        """
        return sum(2 * prod(shape) for shape in self.get_shapes().values() if len(shape) > 1)

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...] | None:
        """Return the shapes of the matmuls in a forward pass of `sizes.tokens` tokens, unsharded, without child nodes.

        Their FLOPs per token must sum to `count_flops`, within 1 %; if they do not, or on None, planning counts the
        node as unknown.
        """
        return list_matmuls(self.get_shapes(), sizes.tokens)

    def count_activation_bytes(self, sizes: LocalSizes) -> int | None:
        """Return the bytes per microbatch and rank that the forward pass saves for the backward pass, without children.

        Count the tensors that this module saves, including the inputs of its linears (`LinearNode` counts none). Do not
        count the output of this module: the module that reads the output counts it. None: core guesses from the shapes.
        """
        return None

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """Return the traffic of this module over folds, without child nodes; () for a fold of one rank in `sizes`.

        For a module on a fold (`gangline.plan.Fold`) that communicates through the Comm from `bind`: only the module's
        node knows the traffic. Do not count gradients that the strategy reduces for the module.
        """
        return ()

    def get_seams(self) -> Mapping[str, Call]:
        """Return the computation of the module's calls at seams, by seam: {"attention": AttentionCall(...)}.

        If a subclass sets another `module` and does not override this method, the calls count as unknown, because the
        module may compute something else. Override with `return super().get_seams()` if it computes the same.
        """
        return {}

    def get_decoding(self) -> Decoding | None:
        """Return how this module, without child nodes, computes the next token in incremental decoding.

        tokenwise  the output for a token depends only on that token and its entries in the batch
        cached     the module stores state of earlier tokens in `Batch.cache` (`gangline.model.cache`)
        None       unknown: all tokens of the text are recomputed for each generated token

        Also unknown if a subclass sets another `module` and does not override this method, as with `get_seams`.
        """
        return None

    def emits_loss(self) -> bool:
        """Return whether this module, without child nodes, adds terms to the loss (`forward_context.emit_loss`)."""
        return False

    def chunk_loss(self, tokens: int) -> Node:
        """Return this node; a node that computes a loss is set to chunks of `tokens` tokens (`run.loss_chunk`)."""
        return self

    def get_ties(self) -> dict[str, str]:
        """Return the tied parameters of this module: name in the module -> full name of the stored parameter."""
        return {}


@dataclass(frozen=True, kw_only=True)
class WrapNode(Node):
    """Node that wraps `inner` at the path of `inner`, such as an adapter; parameters of `inner` keep their names.

    `module` names a class that becomes the first base of the wrapped module's class (`gangline.model.build.Wrapper`).
    Child nodes of the wrapper are siblings of the parameters of `inner`: `wq.lora_a` next to `wq.weight`.
    """

    inner: Node


def iterate_children(node: Node) -> Iterator[tuple[str, Node]]:
    """Iterate over the child nodes with their path from `node`: "attention", "blocks.0"; "" for the wrapped node."""
    children = node.__dict__.get("_children")
    if children is None:  # cached: nodes are immutable, and closed forms iterate over children thousands of times
        children = tuple(_iterate_children(node))
        object.__setattr__(node, "_children", children)
    return iter(children)


def _iterate_children(node: Node) -> Iterator[tuple[str, Node]]:
    for item in fields(node):
        value = getattr(node, item.name)
        if isinstance(node, WrapNode) and item.name == "inner":
            yield "", value
        elif isinstance(value, Node):
            yield item.name, value
        elif isinstance(value, tuple):
            for index, element in enumerate(value):
                if isinstance(element, Node):
                    yield f"{item.name}.{index}", element


def iterate_nodes(tree: Node, path: str = "") -> Iterator[tuple[str, Node]]:
    """Yield every node with its path, parents first; the root's path is "". A wrapper precedes the wrapped node."""
    waiting = [(path, tree)]
    while waiting:
        at, node = waiting.pop()
        yield at, node
        below = [(f"{at}.{name}" if at and name else at or name, child) for name, child in iterate_children(node)]
        waiting += reversed(below)


def map_paths(tree: Node) -> dict[str, Node]:
    """Return path -> node; for nodes that wrap each other, the outermost node."""
    nodes: dict[str, Node] = {}
    for path, node in iterate_nodes(tree):
        nodes.setdefault(path, node)
    return nodes


def replace_node(tree: Node, path: str, new: Node) -> Node:
    """Return a copy of `tree` with `new` at `path`. Raises LookupError if there is no such node."""
    if not path:
        return new
    for name, child in iterate_children(tree):
        if not name:
            continue
        if path == name or path.startswith(name + "."):
            new_child = replace_node(child, path[len(name) + 1 :], new)
            field, _, index = name.partition(".")
            if not index:
                return replace(tree, **{field: new_child})
            row = getattr(tree, field)
            return replace(tree, **{field: (*row[: int(index)], new_child, *row[int(index) + 1 :])})
    if isinstance(tree, WrapNode):
        return replace(tree, inner=replace_node(tree.inner, path, new))
    raise LookupError(
        f"no node {path!r} in {type(tree).__name__}; it has {', '.join(n for n, _ in iterate_children(tree))}"
    )


def get_parameter_shapes(tree: Node) -> dict[str, Shape]:
    """Return the global shapes of all parameters by name, without building the model; tied ones only once."""
    tied = tree.get_ties()
    node_shapes = ((path and f"{path}.", node.get_shapes()) for path, node in iterate_nodes(tree))
    return {at + name: shape for at, own in node_shapes for name, shape in own.items() if at + name not in tied}
