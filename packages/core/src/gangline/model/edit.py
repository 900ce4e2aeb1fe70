"""Contract of model edits. Torch-free."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from gangline.model.tree import Node
from gangline.plan import Plan


class Edit(Protocol):
    """A pure, torch-free function that changes a model before it is built. `Part.build` names the function."""

    @abstractmethod
    def __call__(self, tree: Node, plan: Plan, options: Any) -> tuple[Node, Plan, Sequence[str]]:
        """Return the edited tree and plan, and the paths of the nodes that the edit claims.

        options: the configuration of the edit, an `EditConfig`. Other edits of the run must not claim these paths.
        """
