"""Export of the weights of a model edit to external tools: merged, or as a separate adapter. Torch-free."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gangline.model.adapter import Adapter
    from gangline.plan import Plan


class EditedWeights(ABC):  # noqa: B024  # each of its methods has a default
    """Methods that export the weights of an edit; the defaults suit an edit that wraps no modules."""

    def merge(self, name: str, weight: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Merge `weight`, the full parameter `name`, with the weights that this edit adds around it; return the result.

        Returns None if merging is not supported. If several edits wrap one node, the innermost edit is called first.
        stored: all parameters of the checkpoint by name, read on access.
        """
        return None

    def extract_adapter(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Adapter | None:
        """Return the weights that this edit adds, for a separate adapter file; None if such an export is not supported.

        shapes: shapes of all parameters, by name. `plan.names` has the external names of the wrapped parameters.
        """
        return None
