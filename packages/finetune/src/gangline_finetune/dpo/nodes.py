"""Config node of the DPO loss over pairs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from gangline.model.local_sizes import LocalSizes
from gangline.model.tree import WrapNode


@dataclass(frozen=True, kw_only=True)
class DpoHeadNode(WrapNode):
    """Config node of a head with the DPO loss over pairs."""

    module: ClassVar[str] = "gangline_finetune.dpo.modules:DpoHead"
    beta: float

    def count_activation_bytes(self, sizes: LocalSizes) -> int:
        """Return 0: the wrapped head counts its logits, and only one answer has logits at a time."""
        return 0
