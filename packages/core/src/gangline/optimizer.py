"""The optimizer: contract of the parts of the group `optimizer`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.shard import Registry, Shard


class Optimizer(ABC):
    """Contract of an optimizer, which updates the pieces of a runtime's parameters from their `.grad`.

    The optimizer allocates its state when it is built, so that a load can fill it. State arrays are named
    ``optimizer/<state>/<parameter>`` and sharded like the parameter, unless the optimizer registers other boxes.
    """

    registry: Registry  # all `optimizer/...` arrays, equal on every rank

    @abstractmethod
    def step(self, learning_rate: float) -> None:
        """Update the weights once. Not called for a step that is not finite."""

    @abstractmethod
    def shards(self) -> Iterable[Shard]:
        """Return the `optimizer/...` arrays that this rank holds."""

    def select_filled(self, state: Mapping[str, Any]) -> Iterable[Shard]:
        """Return the shards that a load fills from a checkpoint with the counters `state`.

        If the checkpoint stores arrays in another form (8-bit instead of full-precision moments), return temporary
        shards in that form: `load_state` then converts them into the optimizer's own arrays.
        """
        return self.shards()

    def may_drop(self, names: Sequence[str]) -> Collection[str]:
        """Return the arrays in `names` that a resume may drop; the resume fails if `names` has any other array.

        names: the `optimizer/...` arrays of the checkpoint that neither `registry` nor `select_filled` of any rank has.
        The result must be equal on all ranks. By default empty: dropping a part of the state would change the run.
        """
        return ()

    def state(self) -> dict[str, Any]:
        """Return the optimizer's counters as JSON, equal on all ranks."""
        return {}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore the counters that `state` returned."""
