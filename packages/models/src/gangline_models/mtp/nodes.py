"""Config nodes of multi-token prediction. Torch-free; the formulas are in `gangline_models.mtp.modules`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.linear_nodes import LinearNode
from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import Decoding, Node, WrapNode
from gangline_basics.model.decoder_nodes import HeadNode

INDEX_BYTES = 8  # bytes of a token id


@dataclass(frozen=True, kw_only=True)
class MtpNode(Node):
    """Config node of an MTP module, which predicts the token after the target of the previous module.

    path    path of the module's block, under which it emits metrics
    first   true for the first module
    shares  (parameter name in the module, full parameter name) of embedding and head, which the model owns
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
        """Return the bytes of the merge's input and of token ids, minus the hidden state if the previous head saves it.

        The previous head saves the hidden state, unless the head scales its input. An embedding lookup saves token ids;
        for the first module they are the batch's tensor if the vocabulary is not sharded.
        """
        width = 2 * self.dim if self.first and self.head.scale != 1.0 else self.dim
        rows = 0 if self.first and sizes.size("tp") == 1 else sizes.inner_tokens * INDEX_BYTES
        return sizes.tokens * width * sizes.itemsize + rows


@dataclass(frozen=True, kw_only=True)
class MtpHeadNode(WrapNode):
    """Config node of a head with MTP modules, which adds their loss in training."""

    module: ClassVar[str] = "gangline_models.mtp.modules:MtpHead"
    mtp: tuple[MtpNode, ...]
    weight: float

    def get_decoding(self) -> Decoding | None:
        return "tokenwise"

    def emits_loss(self) -> bool:
        return self.weight > 0

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return 0: the modules count their activations."""
        return 0
