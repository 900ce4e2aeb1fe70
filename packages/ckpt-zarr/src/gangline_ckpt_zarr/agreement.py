"""What the ranks tell each other about one save or load, through the job's key-value store.

Each rank says one word; nothing is gathered, so no rank's work grows with the world.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.comm import Store

# How long a wait sleeps between two looks: a tenth of what has passed, so that it is over at most a tenth late, and no
# longer than it takes for all ranks together to ask the store no more than so often. Each look asks twice: 64 ranks
# look every quarter of a second, 16,384 every 1.6 s.
_FIRST, _LONGEST = 0.001, 0.25  # seconds
_SHARE = 0.1
_ASKED = 20_000  # times a second, by all ranks


class Failed(Exception):
    """Some rank failed; `what` is the JSON value that it left."""

    def __init__(self, what: Any) -> None:
        self.what = what
        super().__init__(str(what))


class Agreement:
    """The keys of one save or load. Without a store (one process) there is nobody to agree with."""

    def __init__(self, store: Store | None, name: str, rank: int, world: int) -> None:
        assert store is not None or world == 1, "several ranks need the job's store"
        self.store, self.name, self.rank, self.world = store, name, rank, world
        self._mine: dict[str, Any] = {}

    def say(self, key: str, value: Any) -> None:
        """Leave a value for all."""
        self._mine[key] = value
        if self.store is not None and self.world > 1:
            self.store.set(f"{self.name}/{key}", json.dumps(value))

    def hear(self, key: str) -> Any:
        """Wait for a value that some rank leaves; raises Failed where one failed."""
        if self.world > 1:
            self._until(lambda: self._there(key))
            assert self.store is not None
            return json.loads(self.store.get(f"{self.name}/{key}"))
        return self._mine[key]

    def fail(self, what: Any) -> None:
        """Tell all that this rank failed; the first to say so is heard."""
        if self.world == 1:
            self._mine.setdefault("failed", what)
        elif self.store is not None and self.store.add(f"{self.name}/failures", 1) == 1:
            self.store.set(f"{self.name}/failed", json.dumps(what))

    def count(self, key: str, number: int) -> int:
        """Add to what all ranks count together; what it is then."""
        if self.store is not None and self.world > 1:
            return self.store.add(f"{self.name}/{key}", number)
        self._mine[key] = self._mine.get(key, 0) + number
        return self._mine[key]

    def all_done(self, key: str) -> None:
        """Wait until every rank has counted 1 for `key`; raises Failed where one failed."""
        if self.store is not None and self.world > 1:
            store = self.store
            self._until(lambda: store.add(f"{self.name}/{key}", 0) >= self.world)
        elif "failed" in self._mine:
            raise Failed(self._mine["failed"])

    def _there(self, key: str) -> bool:
        assert self.store is not None
        return self.store.check([f"{self.name}/{key}"])

    def _until(self, ready: Callable[[], bool]) -> None:
        began, longest = time.monotonic(), max(_LONGEST, 2 * self.world / _ASKED)
        while not ready():
            if self._there("failed"):
                assert self.store is not None
                raise Failed(json.loads(self.store.get(f"{self.name}/failed")))
            time.sleep(min(max(_FIRST, _SHARE * (time.monotonic() - began)), longest))
