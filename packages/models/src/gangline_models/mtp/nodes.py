"""Config nodes of multi-token prediction. Torch-free; the mathematics is in `gangline_models.mtp.modules`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Decoding, Node, WrapNode
from gangline_basics.model.decoder_nodes import HeadNode

INDEX_BYTES = 8  # of the number of a token


@dataclass(frozen=True, kw_only=True)
class MtpNode(Node):
    """What predicts one token further than the module before.

    embed and head are the model's own, told by `shares`: name from here -> full name. path: of the block,
    under which it emits. first: no other module is before it.
    """

    module: ClassVar[str] = "gangline_models.mtp.modules:MtpModule"
    path: str
    first: bool
    dim: int
    embed: Node
    embed_norm: Node
    hidden_norm: Node
    merge: LinearNode
    block: Node
    head: HeadNode
    shares: tuple[tuple[str, str], ...]

    def get_ties(self) -> dict[str, str]:
        return dict(self.shares)

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """What the product that merges reads, less what goes in: that the head before keeps, too, unless it scales.

        A lookup keeps which rows it took: those of the first module are the batch's own, where the vocabulary is whole.
        """
        width = 2 * self.dim if self.first and self.head.scale != 1.0 else self.dim
        rows = 0 if self.first and sizes.size("tp") == 1 else sizes.inner_tokens * INDEX_BYTES
        return sizes.tokens * width * sizes.itemsize + rows


@dataclass(frozen=True, kw_only=True)
class MtpHeadNode(WrapNode):
    """A head that has modules for further tokens beside it, and adds their loss while it is trained."""

    module: ClassVar[str] = "gangline_models.mtp.modules:MtpHead"
    mtp: tuple[MtpNode, ...]
    weight: float

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def emits_loss(self) -> bool:
        return self.weight > 0

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """The modules say their own."""
        return 0
