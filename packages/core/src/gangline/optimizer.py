"""The optimizer contract."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.shard import Registry, Shard


class Optimizer(ABC):
    """Steps the pieces of a runtime's parameters from their `.grad`.

    State is allocated when the optimizer is built, so that a load has something to fill, and is named
    ``optimizer/<state>/<parameter>`` with the boxes of its parameter unless the optimizer registers others.
    """

    registry: Registry  # of the `optimizer/...` arrays, whole and the same on every rank

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """One update. Not called for a step that is not finite."""

    @abstractmethod
    def shards(self) -> Iterable[Shard]:
        """The `optimizer/...` arrays that this rank holds."""

    def filled_from(self, state: Mapping[str, Any]) -> Iterable[Shard]:
        """What is loaded from a checkpoint with this `state`: `shards`, or others that `load_state` makes these of."""
        return self.shards()

    def state(self) -> dict[str, Any]:
        """Counters, as JSON, equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Take back what `state` gave."""
