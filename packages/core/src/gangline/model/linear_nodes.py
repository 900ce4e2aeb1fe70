"""The nodes of `gangline.model.linear`, whose modules a strategy cuts by itself. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gangline.model.local_sizes import LocalSizes
from gangline.model.products import Product
from gangline.model.tree import Decoding, Node, Shape


@dataclass(frozen=True, kw_only=True)
class EmbeddingNode(Node):
    """A vector for each token, times `scale`."""

    module: ClassVar[str] = "gangline.model.linear:Embedding"
    vocab_size: int
    dim: int
    scale: float = 1.0

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.dim)}

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_flops(self, sequence_length: int) -> int:
        """None: a row is looked up, nothing is multiplied."""
        return 0

    def list_products(self, sizes: LocalSizes, sequence_length: int) -> tuple[Product, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class LinearNode(Node):
    """x (..., in) -> x Wᵀ + b (..., out). Below a node that knows its sizes (`fit_linears`) they may be left out."""

    module: ClassVar[str] = "gangline.model.linear:Linear"
    in_features: int = 0
    out_features: int = 0
    bias: bool = False

    def get_shapes(self) -> dict[str, Shape]:
        shapes: dict[str, Shape] = {"weight": (self.out_features, self.in_features)}
        return shapes | ({"bias": (self.out_features,)} if self.bias else {})

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Nothing of its own: the module around it counts its input, for it knows who else reads that."""
        return 0

    def count_rows(self, sizes: LocalSizes) -> int:
        """How many rows it multiplies of a microbatch on one rank, those that a product that tp cuts has beside."""
        return sizes.tokens


LINEAR = LinearNode()  # of the size that the node around it says


def fit_linears(node: Node, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Give the plain linears below `node` their sizes: name of the field -> (in_features, out_features).

    For `__post_init__` of a node whose own fields say how wide its products are: so `replace(node, hidden=...)` changes
    them too. What an edit has put there instead of a `LinearNode` stays as it is.
    """
    for name, (in_features, out_features) in sizes.items():
        child = getattr(node, name)
        if type(child) is LinearNode:
            object.__setattr__(node, name, replace(child, in_features=in_features, out_features=out_features))
            node.__dict__.pop("_children", None)
