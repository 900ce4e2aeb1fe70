"""Nodes of `gangline.model.linear`, whose modules a strategy shards by itself. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from gangline.model.local_sizes import LocalSizes
from gangline.model.matmuls import AnyMatmul
from gangline.model.tree import Decoding, Node, Shape


@dataclass(frozen=True, kw_only=True)
class EmbeddingNode(Node):
    """Embedding: a vector for each token, times `scale`."""

    module: ClassVar[str] = "gangline.model.linear:Embedding"
    vocab_size: int
    dim: int
    scale: float = 1.0

    def get_shapes(self) -> dict[str, Shape]:
        return {"weight": (self.vocab_size, self.dim)}

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def count_flops(self, sequence_length: int) -> int:
        """Return 0: a row is looked up, without a matmul."""
        return 0

    def list_matmuls(self, sizes: LocalSizes, sequence_length: int) -> tuple[AnyMatmul, ...]:
        return ()


@dataclass(frozen=True, kw_only=True)
class LinearNode(Node):
    """Linear layer: x (..., in) -> x Wᵀ + b (..., out). The parent node may set the sizes (`fit_linears`)."""

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
        """Return 0: the parent module counts the linear's input, because it knows which other modules read it."""
        return 0

    def count_rows(self, sizes: LocalSizes) -> int:
        """Return the rows of the matmul per microbatch and rank, without extra rows of tp-sharded matmuls."""
        return sizes.tokens


LINEAR = LinearNode()  # its parent node sets the sizes


def fit_linears(node: Node, sizes: Mapping[str, tuple[int, int]]) -> None:
    """Set the sizes of the plain linears below `node`. sizes: name of the field -> (in_features, out_features).

    For `__post_init__` of a node whose own fields determine the widths, so that `replace(node, ffn_dim=...)` also
    changes the linears. A node that replaced a `LinearNode` in an edit does not change.
    """
    for name, (in_features, out_features) in sizes.items():
        child = getattr(node, name)
        if type(child) is LinearNode:
            object.__setattr__(node, name, replace(child, in_features=in_features, out_features=out_features))
            node.__dict__.pop("_children", None)
