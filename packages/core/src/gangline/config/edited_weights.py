"""How others have the weights of an edited model, as the edit's configuration says. Torch-free."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from gangline.model.adapter import Adapter
    from gangline.plan import Plan


class EditedWeights(ABC):  # noqa: B024  # each of its methods has a default
    """For an edit whose model others do not have; one whose model they have overrides these."""

    def to_hugging_face(self, config: dict[str, Any]) -> dict[str, Any] | None:
        """The config.json of the edited model, given that of the model without the edit; None: others have no such.

        Raises UserError where others would have it with other options, and names these.
        """
        return None

    def merged(self, name: str, weight: torch.Tensor, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        """The parameter `name`, whole, with what this edit wraps around it added; `weight` itself where nothing is.

        stored: all parameters of the checkpoint by name, read when asked for. None: it cannot be merged. Of several
        edits that wrap one node the innermost is asked first.
        """
        return None

    def apart(self, shapes: Mapping[str, tuple[int, ...]], plan: Plan) -> Adapter | None:
        """What `gangline export --apart` writes of the parameters of these names and shapes; None: nothing of it.

        `plan.names` tells what others call the parameters that are wrapped.
        """
        return None

    def in_files(self, directory: str) -> bool:
        """Of options that `of_hugging_face` gave: whether the directory has their weights; else it is read without."""
        return True
