"""What the ranks agree on about one save or load, through the job's key-value store.

Ranks publish values, wait for those of others, and count up to the world size; nothing is gathered, so no rank's work
grows with the world. When a wait has a time-out and it has passed, rank 0 reads each rank's newest key, once, to name
those that have not answered.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

if TYPE_CHECKING:
    from gangline.comm.base import Store

# A wait polls the store: each pause is a tenth of what has passed, so that the wait is over at most a tenth late, but
# never so short that all ranks together ask more than _ASKED times a second. Each poll asks twice: up to 1,250 ranks
# poll every quarter of a second, 16,384 every 3.3 s. A store on two cores, shared with two clients that did nothing
# else, answered 30,000 times a second.
_FIRST, _LONGEST = 0.001, 0.25  # seconds
_SHARE = 0.1
_ASKED = 10_000  # times a second, by all ranks
_OTHERS = 1.2  # other ranks wait so many times as long as rank 0, so that it can name those that are silent
_HEARTBEAT = 0.1  # of the patience: the time between two heartbeats of a rank
_NAMED = 8  # silent ranks
_UNREACHED = 5.0  # seconds for which a store that cannot be reached is asked again

T = TypeVar("T")


class Failed(Exception):
    """Some rank failed; `what` is the JSON value that it published.

    `late`: it may count as done, for its wait timed out or the store was lost, so other ranks may still do theirs.
    """

    def __init__(self, what: Any, late: bool = False) -> None:
        self.what, self.late = what, late
        super().__init__(str(what))


class StoreLost(ConnectionError):
    """The job's store does not answer. What was to be added may have been, or not: nobody knows."""


class PrefixedStore:
    """The job's store, whatever it is made of, with keys that begin with a prefix. Raises StoreLost.

    One that may come back is asked again for a while, for a rank that gave up at once could not tell the others, which
    would wait for it. Not the client of torch's TCPStore, which never connects twice; and never an `add` whose answer
    was lost: counted twice, one rank would pass for two, and what it has not written for written.
    """

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._store.set(f"{self._prefix}/{key}", value))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: self._store.get(f"{self._prefix}/{key}"))

    def add(self, key: str, amount: int) -> int:
        return self._ask(lambda: self._store.add(f"{self._prefix}/{key}", amount), again=not amount)

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: self._store.check([f"{self._prefix}/{key}" for key in keys]))

    def _ask(self, ask: Callable[[], T], again: bool = True) -> T:
        until = time.monotonic() + (_UNREACHED if again else 0.0)
        while True:
            try:
                return ask()
            except dist.DistError as error:
                raise StoreLost(f"the job's store is lost: {error}") from error
            except ConnectionError as error:
                if time.monotonic() >= until:
                    raise StoreLost(f"the job's store is lost: {error}") from error
                time.sleep(_LONGEST)


class Agreement:
    """The keys of one save or load in the job's store. Without a store (one process) there is nobody to agree with.

    `patience`: seconds that a rank waits without a `send_heartbeat` of any rank; None: for ever. `newest`: prefix of
    the keys that hold what each rank did last, one for all saves, so that the store does not grow with their number.
    """

    def __init__(
        self, store: Store | None, name: str, rank: int, world: int, patience: float | None = None, newest: str = ""
    ) -> None:
        assert store is not None or world == 1, "several ranks need the job's store"
        self.store, self.name, self.rank, self.world = store, name, rank, world
        self.patience = patience and patience * (_OTHERS if rank else 1)
        self._newest = newest
        self._mine: dict[str, Any] = {}
        self._seen = 0  # heartbeats of all ranks, when last looked at
        self._next = 0.0  # time of this rank's next heartbeat

    def publish(self, key: str, value: Any) -> None:
        """Put a value where every rank can read it."""
        self._mine[key] = value
        if self.store is not None and self.world > 1:
            self.store.set(f"{self.name}/{key}", json.dumps(value))

    def wait_for(self, key: str, publisher: str = "rank 0") -> Any:
        """Return what `publisher` publishes, waited for. Raises Failed where some rank failed or `patience` is over."""
        if self.world > 1:
            self._wait_until(lambda: self._exists(key), lambda: f"{publisher} has not answered")
            assert self.store is not None
            return json.loads(self.store.get(f"{self.name}/{key}"))
        return self._mine[key]

    def fail(self, what: Any, late: bool = False) -> None:
        """Make all ranks fail; of several causes the first one published is raised everywhere."""
        if self.world == 1:
            self._mine.setdefault("failed", [what, late])
        elif self.store is not None and self._fails_first():
            self.store.set(f"{self.name}/failed", json.dumps([what, late]))

    def _fails_first(self) -> bool:
        """True also where nobody knows: two causes are better than none."""
        assert self.store is not None
        try:
            return self.store.add(f"{self.name}/failures", 1) == 1
        except StoreLost:
            return True

    def check(self) -> None:
        """Raises Failed where some rank has."""
        if self.store is not None and self.world > 1:
            if self._exists("failed"):
                raise Failed(*json.loads(self.store.get(f"{self.name}/failed")))
        elif "failed" in self._mine:
            raise Failed(*self._mine["failed"])

    def send_heartbeat(self) -> None:
        """This rank makes progress, so no rank's wait times out yet. May be called as often as one likes."""
        now = time.monotonic()
        if self.patience is not None and self.store is not None and self.world > 1 and now >= self._next:
            self._next = now + _HEARTBEAT * self.patience
            with contextlib.suppress(StoreLost):  # one beat more or less; what comes next says it
                self.store.add(f"{self.name}/alive", 1)

    def count(self, key: str, number: int) -> int:
        """Add to a counter that all ranks share; its new value."""
        if self.store is not None and self.world > 1:
            return self.store.add(f"{self.name}/{key}", number)
        self._mine[key] = self._mine.get(key, 0) + number
        return self._mine[key]

    def mark_done(self, key: str) -> None:
        """This rank has done its part of `key`."""
        if self.store is not None and self.world > 1 and self.patience is not None:
            self.store.set(f"{self._newest}/{self.rank}", f"{self.name}/{key}")
        self.count(key, 1)

    def wait_for_all(self, key: str) -> None:
        """Wait until every rank has marked `key` as done. Raises Failed where one failed or `patience` is over."""
        if self.store is not None and self.world > 1:
            store = self.store
            self._wait_until(
                lambda: store.add(f"{self.name}/{key}", 0) >= self.world, lambda: self._describe_silent_ranks(key)
            )
        else:
            self.check()

    def _exists(self, key: str) -> bool:
        assert self.store is not None
        return self.store.check([f"{self.name}/{key}"])

    def _wait_until(self, ready: Callable[[], bool], silent: Callable[[], str]) -> None:
        began, longest = time.monotonic(), max(_LONGEST, 2 * self.world / _ASKED)
        since = began  # when a heartbeat was last seen
        while not ready():
            self.check()
            now = time.monotonic()
            if self.patience is not None and now - since >= self.patience:
                heartbeats = self.count("alive", 0)
                if heartbeats == self._seen:
                    why = f"{silent()} within {self.patience:g} s"
                    self.fail(why, late=True)
                    raise Failed(why, late=True)
                self._seen, since = heartbeats, now
            time.sleep(min(max(_FIRST, _SHARE * (now - began)), longest))

    def _describe_silent_ranks(self, key: str) -> str:
        """Which ranks have not answered: rank 0 names them, the others know how many."""
        assert self.store is not None
        number = self.world - self.count(key, 0)
        if self.rank:
            return f"{number} of {self.world} ranks have not answered"
        names = []
        for rank in range(self.world):
            newest = f"{self._newest}/{rank}"
            done = self.store.check([newest]) and self.store.get(newest).decode() == f"{self.name}/{key}"
            if not done:
                names.append(str(rank))
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        which = ", ".join(names[:_NAMED])
        return f"rank {which} has not answered" if len(names) == 1 else f"ranks {which}{more} have not answered"
