"""The copies to the durable tier: one under way at a time, and no failure that nobody is told of.

Training waits for the near tiers alone, so a copy may outlive the handle of its save. Who told whom must be the same on
all ranks, or some would end a run with one more save than others: rank 0's plan of a save says which copies were still
under way then, and which failures this save has to tell.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from gangline.checkpoint.base import CheckpointId
from gangline_ckpt_zarr.save.delivery import Delivery

_LOOK = 0.25  # seconds


class DurableCopies:
    """Those of this rank that are under way, or of whose end nobody has been told yet; oldest first."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._all: tuple[Delivery, ...] = ()

    def add(self, copy: Delivery) -> None:
        self._all += (copy,)

    def held(self) -> Collection[CheckpointId]:
        """What is being copied, and must stay where it is copied from."""
        return {copy.id for copy in self._all if not copy.over}

    def join(self, waiting: Callable[[], None] = lambda: None) -> None:
        """Wait until none is under way; `waiting` is called again and again meanwhile."""
        for copy in self._all:
            while not copy.join(_LOOK):
                waiting()

    def split(self) -> tuple[list[str], list[tuple[str, str]]]:
        """(those under way, those that failed and why), as rank 0 sees it."""
        over = [copy for copy in self._all if copy.over]
        return [str(copy.id) for copy in self._all if copy not in over], self._failed(over)

    def keep(self, under_way: Sequence[str]) -> list[Delivery]:
        """Forget all but these: the others are over, and are told of."""
        self._all = tuple(copy for copy in self._all if str(copy.id) in under_way)
        return [*self._all]

    def tell(self, copies: Sequence[Delivery]) -> list[tuple[str, str]]:
        """What has failed of these, which are over; they are told of then."""
        self._all = tuple(copy for copy in self._all if copy not in copies)
        return self._failed(copies)

    def _failed(self, copies: Sequence[Delivery]) -> list[tuple[str, str]]:
        return [(str(copy.id), f"its copy to {self._place}: {copy.why}") for copy in copies if copy.why]
