"""The config node of the loss over pairs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import WrapNode


@dataclass(frozen=True, kw_only=True)
class DpoHeadNode(WrapNode):
    """A head whose loss is of pairs."""

    module: ClassVar[str] = "gangline_finetune.dpo.modules:DpoHead"
    beta: float

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Logits stand once for each answer; what the head keeps it says itself."""
        return 0
