"""Tree of frozen config nodes that describes a model, and functions to iterate over it. Torch-free.

Each node names the module that it builds, so a node of a plugin needs no entry in a table. The path of a node in the
tree ("blocks.3.feed_forward") is the name of its module in the model. A model edit replaces nodes.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from math import prod
from typing import ClassVar, Literal

from gangline.model.calls import Call
from gangline.model.local_sizes import CommVolume, LocalSizes
from gangline.model.products import Product, list_products

Shape = tuple[int, ...]
Decoding = Literal["tokenwise", "cached"]


@dataclass(frozen=True, kw_only=True)
class Node(ABC):
    """One module as data. `module` is "package.module:Class"; its constructor takes the node and nothing else."""

    module: ClassVar[str]

    def get_shapes(self) -> dict[str, Shape]:
        """Return name -> global shape of the parameters of this node's module, those of child nodes left out."""
        return {}

    def count_flops(self, sequence_length: int) -> int:
        """Return the floating-point operations of a forward pass of one token, children left out.

        By default two for each weight of a parameter of two dims and more, as if each token multiplied it once. A node
        whose module does something else overrides this.
        """
        return sum(2 * prod(shape) for shape in self.get_shapes().values() if len(shape) > 1)

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...] | None:
        """Return the matmuls of a forward pass of `sizes.tokens` tokens as shapes, unsharded, children left out.

        Their operations must sum to `count_flops`, within 1 %; if they do not, or on None, planning counts the node as
        unknown.
        """
        return list_products(self.get_shapes(), sizes.tokens)

    def count_activation_bytes(self, sizes: LocalSizes) -> int | None:
        """Return the bytes that a microbatch's forward pass saves for the backward pass on a rank, children left out.

        Count the tensors that this module saves, the inputs of its linears included (`LinearNode` counts none). Do not
        count its output: the module that reads it does. None: guess from the shapes.
        """
        return None

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """Return the traffic of this module over folds, children left out; nothing for a fold of one rank in `sizes`.

        For a module on a fold (`gangline.plan.Fold`) that communicates through the Comm that `bind` gave it: only its
        node knows what it sends. Leave out the gradients that the strategy sends for it.
        """
        return ()

    def get_seams(self) -> Mapping[str, Call]:
        """Return the computation of the module's calls at seams, by seam: {"attention": AttentionCall(...)}.

        The tree treats the calls as unknown if a subclass sets another `module` and does not override this method:
        another module may compute something else. `return super().get_seams()` states that it does not.
        """
        return {}

    def get_decoding(self) -> Decoding | None:
        """Return how this module, children left out, takes one more token of a text.

        tokenwise  its output for a token depends on that token alone, and on what the batch says of it
        cached     it stores what it needs of earlier tokens in `Batch.cache` (`gangline.model.cache`)
        None       unknown: all tokens of the text are computed again for each token that is written

        Unknown, too, for a subclass that sets another `module` without overriding it, as with `get_seams`.
        """
        return None

    def emits_loss(self) -> bool:
        """Return whether this module, children left out, adds terms to the loss (`forward_context.emit_loss`)."""
        return False

    def chunk_loss(self, tokens: int) -> Node:
        """Return this node with its loss, if any, computed for `tokens` tokens at a time (`run.loss_chunk`)."""
        return self

    def get_ties(self) -> dict[str, str]:
        """Return the tied parameters of this module: name within it -> full name that the parameter is stored under."""
        return {}


@dataclass(frozen=True, kw_only=True)
class WrapNode(Node):
    """A node around `inner`, with the same path: an adapter around a linear. Parameters of `inner` keep their names.

    `module` names a class that is put in front of the class of the wrapped module (`gangline.model.build.Wrapper`). Its
    own child nodes are next to those of `inner`: `wq.lora_a` next to `wq.weight`.
    """

    inner: Node


def iterate_children(node: Node) -> Iterator[tuple[str, Node]]:
    """Iterate over the child nodes with their path from `node`: "attention", "blocks.0"; "" for the wrapped node."""
    children = node.__dict__.get("_children")
    if children is None:  # nodes do not change, and closed forms ask for these thousands of times
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
    """Return path -> node; of nodes that wrap each other, the outermost."""
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
    """Return the global shapes of all parameters by name, without building the model; a tied one under one name."""
    tied = tree.get_ties()
    node_shapes = ((path and f"{path}.", node.get_shapes()) for path, node in iterate_nodes(tree))
    return {at + name: shape for at, own in node_shapes for name, shape in own.items() if at + name not in tied}
