"""Model edits: their contract. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from gangline.model.tree import Node
from gangline.plan import Plan


class Edit(Protocol):
    """A pure, torch-free function that changes a model before it is built. A part names the function in `build`."""

    @abstractmethod
    def __call__(self, tree: Node, plan: Plan, options: Any) -> tuple[Node, Plan, Sequence[str]]:
        """Return the edited tree and plan, and the paths of the nodes that the edit claims.

        options: the configuration of the part, an `EditConfig`. No other edit of the run may claim these paths.
        """
