"""What the ranks tell each other about one save or load, through the job's key-value store.

Each rank says one word; nothing is gathered, so no rank's work grows with the world. Where patience has an end, and it
has come, rank 0 looks at every rank's word, once, to name those that have said nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.comm import Store

# How long a wait sleeps between two looks: a tenth of what has passed, so that it is over at most a tenth late, and no
# longer than it takes for all ranks together to ask the store no more than so often. Each look asks twice: up to 1,250
# ranks look every quarter of a second, 16,384 every 3.3 s. A store on two cores, shared with two clients that did
# nothing else, answered 30,000 times a second.
_FIRST, _LONGEST = 0.001, 0.25  # seconds
_SHARE = 0.1
_ASKED = 10_000  # times a second, by all ranks
_OTHERS = 1.2  # times as patient as rank 0 is any other, so that rank 0 can name those that are silent
_ALIVE = 0.1  # of the patience: how often a rank that is getting on says so
_NAMED = 8  # silent ranks


class Failed(Exception):
    """Some rank failed; `what` is the JSON value that it left.

    `late`: it had done its part and grew tired of waiting, so somebody may still do the rest.
    """

    def __init__(self, what: Any, late: bool = False) -> None:
        self.what, self.late = what, late
        super().__init__(str(what))


class Agreement:
    """The keys of one save or load. Without a store (one process) there is nobody to agree with.

    `patience`: seconds that a rank waits while no rank at all is getting on (`alive`); None: for ever.
    """

    def __init__(
        self, store: Store | None, name: str, rank: int, world: int, patience: float | None = None, words: str = ""
    ) -> None:
        assert store is not None or world == 1, "several ranks need the job's store"
        self.store, self.name, self.rank, self.world = store, name, rank, world
        self.patience = patience and patience * (_OTHERS if rank else 1)
        self._words = words  # where each rank's newest word is, so that the store does not grow with ranks times saves
        self._mine: dict[str, Any] = {}
        self._seen = 0  # of the words of those who are getting on
        self._next = 0.0  # when to say so again

    def say(self, key: str, value: Any) -> None:
        """Leave a value for all."""
        self._mine[key] = value
        if self.store is not None and self.world > 1:
            self.store.set(f"{self.name}/{key}", json.dumps(value))

    def hear(self, key: str, who: str = "rank 0") -> Any:
        """Wait for a value that `who` leaves; raises Failed where some rank failed."""
        if self.world > 1:
            self._until(lambda: self._there(key), lambda: f"{who} has not answered")
            assert self.store is not None
            return json.loads(self.store.get(f"{self.name}/{key}"))
        return self._mine[key]

    def fail(self, what: Any, late: bool = False) -> None:
        """Tell all that this rank failed; the first to say so is heard."""
        if self.world == 1:
            self._mine.setdefault("failed", [what, late])
        elif self.store is not None and self.store.add(f"{self.name}/failures", 1) == 1:
            self.store.set(f"{self.name}/failed", json.dumps([what, late]))

    def check(self) -> None:
        """Raises Failed where some rank has."""
        if self.store is not None and self.world > 1:
            if self._there("failed"):
                raise Failed(*json.loads(self.store.get(f"{self.name}/failed")))
        elif "failed" in self._mine:
            raise Failed(*self._mine["failed"])

    def alive(self) -> None:
        """This rank is getting on, so nobody's patience has an end yet. May be said as often as one likes."""
        now = time.monotonic()
        if self.patience is not None and self.store is not None and self.world > 1 and now >= self._next:
            self._next = now + _ALIVE * self.patience
            self.store.add(f"{self.name}/alive", 1)

    def count(self, key: str, number: int) -> int:
        """Add to what all ranks count together; what it is then."""
        if self.store is not None and self.world > 1:
            return self.store.add(f"{self.name}/{key}", number)
        self._mine[key] = self._mine.get(key, 0) + number
        return self._mine[key]

    def done(self, key: str) -> None:
        """This rank has done its part of `key`."""
        if self.store is not None and self.world > 1 and self.patience is not None:
            self.store.set(f"{self._words}/{self.rank}", f"{self.name}/{key}")
        self.count(key, 1)

    def all_done(self, key: str) -> None:
        """Wait until every rank has counted 1 for `key`; raises Failed where one failed."""
        if self.store is not None and self.world > 1:
            store = self.store
            self._until(lambda: store.add(f"{self.name}/{key}", 0) >= self.world, lambda: self._silent(key))
        else:
            self.check()

    def _there(self, key: str) -> bool:
        assert self.store is not None
        return self.store.check([f"{self.name}/{key}"])

    def _until(self, ready: Callable[[], bool], silent: Callable[[], str]) -> None:
        began, longest = time.monotonic(), max(_LONGEST, 2 * self.world / _ASKED)
        since = began  # when some rank was last seen to get on
        while not ready():
            self.check()
            now = time.monotonic()
            if self.patience is not None and now - since >= self.patience:
                seen = self.count("alive", 0)
                if seen == self._seen:
                    why = f"{silent()} within {self.patience:g} s"
                    self.fail(why, late=True)
                    raise Failed(why, late=True)
                self._seen, since = seen, now
            time.sleep(min(max(_FIRST, _SHARE * (now - began)), longest))

    def _silent(self, key: str) -> str:
        """Who has not done his part: rank 0 looks, the others know how many."""
        assert self.store is not None
        number = self.world - self.count(key, 0)
        if self.rank:
            return f"{number} of {self.world} ranks have not answered"
        names = []
        for rank in range(self.world):
            word = f"{self._words}/{rank}"
            said = self.store.check([word]) and self.store.get(word).decode() == f"{self.name}/{key}"
            if not said:
                names.append(str(rank))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = ", ".join(names[:_NAMED])
        return f"rank {which} has not answered" if len(names) == 1 else f"ranks {which}{more} have not answered"
