"""What a model is made of: a tree of frozen config nodes, and the ways through it. Torch-free.

Each node names the module it builds, so a foreign node needs no table here; the path of a node
in the tree ("blocks.3.feed_forward") is the name of its module in the model. A model edit replaces nodes.
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
        """Global shapes of the parameters of this node's module that lie in no child node, by their name in it."""
        return {}

    def count_flops(self, sequence_length: int) -> int:
        """Forward floating-point operations for one token, children left out: two for each weight of a product.

        What has two dims and more counts as multiplied once by each token; a node where that is not so overrides this.
        """
        return sum(2 * prod(shape) for shape in self.get_shapes().values() if len(shape) > 1)

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...] | None:
        """What a forward pass of `sizes.tokens` tokens multiplies, children left out and nothing cut, as shapes.

        Together they come to `count_flops`. None: the node does not say."""
        return list_products(self.get_shapes(), sizes.tokens)

    def count_activation_bytes(self, sizes: LocalSizes) -> int | None:
        """Bytes that the forward pass of a microbatch keeps for the backward pass on a rank, children left out.

        An input that is kept counts, an output does not: that counts where it is read. None: guess from the shapes.
        """
        return None

    def list_volumes(self, sizes: LocalSizes) -> tuple[CommVolume, ...]:
        """What this module sends over folds, children left out; nothing where `sizes` has one rank for them.

        For a module on a fold (`gangline.plan.Fold`) that communicates through the Comm that `bind` gave it: only the
        node knows what crosses. What a strategy sends for it (gradients) is not part of it."""
        return ()

    def get_seams(self) -> Mapping[str, Call]:
        """What this module's calls at seams of the plan compute, by the seam's name: {"attention": AttentionCall(...)}.

        It counts for the `module` of this very class: a class that names another module says it anew, perhaps by
        `return super().seams()`, or else what its module computes there is unknown (`gangline.model.seams`).
        """
        return {}

    def get_decoding(self) -> Decoding | None:
        """How this module, children left out, takes one more token of a text. Of this very class's, as `get_seams` is.

        tokenwise  what it gives for a token depends on that token alone, and on what the batch says of it
        cached     it keeps what it needs of earlier tokens in `Batch.cache` (`gangline.model.cache`)
        None       it does not say, and all tokens of the text are computed again for each that is written
        """
        return None

    def emits_loss(self) -> bool:
        """Whether this module, children left out, adds terms to the objective (`forward_context.emit_loss`)."""
        return False

    def chunk_loss(self, tokens: int) -> Node:
        """This node with its loss computed for so many tokens at a time (`run.loss_chunk`); itself: it has no such."""
        return self

    def get_ties(self) -> dict[str, str]:
        """Parameters in this module that are another one: alias, from here -> the full name it is kept under."""
        return {}


@dataclass(frozen=True, kw_only=True)
class WrapNode(Node):
    """A node around `inner` that has the same path: an adapter around a linear. What is inside keeps its names.

    `module` names a class that is put in front of the class of what it wraps (`gangline.model.build.Wrapper`). Its own
    child nodes lie beside those of `inner`: `wq.lora_a` beside `wq.weight`.
    """

    inner: Node


def iterate_children(node: Node) -> Iterator[tuple[str, Node]]:
    """The nodes directly below, by their path from `node`: "attention", "blocks.0"; "" for what a node wraps."""
    found = node.__dict__.get("_children")
    if found is None:  # nodes do not change, and closed forms ask for these thousands of times
        found = tuple(_iterate_children(node))
        object.__setattr__(node, "_children", found)
    return iter(found)


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
    """Every node with its path, parents first; the root's path is "". A wrapper comes before what it wraps."""
    waiting = [(path, tree)]
    while waiting:
        at, node = waiting.pop()
        yield at, node
        below = [(f"{at}.{name}" if at and name else at or name, child) for name, child in iterate_children(node)]
        waiting += reversed(below)


def map_paths(tree: Node) -> dict[str, Node]:
    """Path -> node; where one wraps another, the outermost."""
    found: dict[str, Node] = {}
    for path, node in iterate_nodes(tree):
        found.setdefault(path, node)
    return found


def replace_node(tree: Node, path: str, new: Node) -> Node:
    """A copy of `tree` with `new` at `path`. Raises LookupError where there is no such node."""
    if not path:
        return new
    for name, child in iterate_children(tree):
        if not name:
            continue
        if path == name or path.startswith(name + "."):
            grown = replace_node(child, path[len(name) + 1 :], new)
            field, _, index = name.partition(".")
            if not index:
                return replace(tree, **{field: grown})
            row = getattr(tree, field)
            return replace(tree, **{field: (*row[: int(index)], grown, *row[int(index) + 1 :])})
    if isinstance(tree, WrapNode):
        return replace(tree, inner=replace_node(tree.inner, path, new))
    raise LookupError(
        f"no node {path!r} in {type(tree).__name__}; it has {', '.join(n for n, _ in iterate_children(tree))}"
    )


def get_parameter_shapes(tree: Node) -> dict[str, Shape]:
    """Global shape of every parameter of the model by its name, without building it; a tied one where it is kept."""
    tied = tree.get_ties()
    named = ((path and f"{path}.", node.get_shapes()) for path, node in iterate_nodes(tree))
    return {at + name: shape for at, own in named for name, shape in own.items() if at + name not in tied}
