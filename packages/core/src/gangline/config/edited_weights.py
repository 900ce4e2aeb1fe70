"""Weights of an edited model as external tools take them: merged, or the added ones apart. Torch-free."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from gangline.model.adapter import Adapter
    from gangline.plan import Plan


class EditedWeights(ABC):  # noqa: B024  # each of its methods has a default
    """For an edit without such weights; an edit that wraps modules overrides these."""

    def merge(self, name: str, weight: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """Return the full parameter `name` with what this edit wraps around it added; `weight` if it wraps nothing.

        stored: all parameters of the checkpoint by name, read when asked for. None: they cannot be merged. Of several
        edits that wrap one node the innermost is asked first.
        """
        return None

    def extract_adapter(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Adapter | None:
        """Return what this edit wraps around the weights, to write it alone; None if it cannot be written.

        shapes: of all parameters, by name. `plan.names` has the external names of the wrapped parameters.
        """
        return None
