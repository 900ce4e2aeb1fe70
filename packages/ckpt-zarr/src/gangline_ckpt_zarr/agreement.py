"""Coordination of the ranks in one save or load, through the job's key-value store.

Ranks publish values, wait for values of other ranks, and increment shared counters up to the world size. No rank
gathers a value of every rank, so the work of a rank does not grow with the world size. When a wait times out, rank 0
reads the newest key of each rank once, to name the ranks that have not answered.
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

# A wait polls the store. The pause between two polls is a tenth of the time waited so far, so a wait takes at most a
# tenth longer than necessary. The pause grows until all ranks together send at most _ASKED requests per second. A poll
# sends two requests: in a long wait, up to 1,250 ranks poll every quarter of a second, 16,384 ranks every 3.3 s. For
# comparison, a store that shared two cores with two clients, which only sent requests, answered 30,000 per second.
_FIRST, _LONGEST = 0.001, 0.25  # first and longest pause between two polls, in seconds
_SHARE = 0.1
_ASKED = 10_000  # maximum store requests per second in a long wait, summed over all ranks
# Time-out of ranks other than 0, as a multiple of the time-out of rank 0. Rank 0 times out first, because only rank 0
# names the ranks that have not answered.
_OTHERS = 1.2
_HEARTBEAT = 0.1  # interval between two heartbeats of a rank, as a fraction of its time-out
_NAMED = 8  # maximum number of ranks that an error message about missing answers names
_UNREACHED = 5.0  # maximum seconds for which requests to an unreachable store are retried

T = TypeVar("T")


class Failed(Exception):
    """Failure of a rank, raised on every rank; `what`: the JSON value that the failing rank published.

    `late`: the wait of the failing rank timed out, or it lost the store. Other ranks may have counted the failing rank
    as done, and may complete the save.
    """

    def __init__(self, what: Any, late: bool = False) -> None:
        self.what, self.late = what, late
        super().__init__(str(what))


class StoreLost(ConnectionError):
    """The job's key-value store does not answer. It is unknown whether a pending `add` took effect."""


class PrefixedStore:
    """The job's key-value store, of any kind, with a prefix for all keys. Raises StoreLost.

    Requests to an unreachable store are retried for some seconds: a rank that gave up at once could not report its
    failure, and the other ranks would wait for it. Two kinds of requests are not retried: any request of torch's
    TCPStore client, which never reconnects, and an `add` whose answer was lost. A second `add` could count one rank
    twice, and then the missing file of another rank would count as written.
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
                raise StoreLost(f"the connection to the job's key-value store is lost: {error}") from error
            except ConnectionError as error:
                if time.monotonic() >= until:
                    raise StoreLost(f"the connection to the job's key-value store is lost: {error}") from error
                time.sleep(_LONGEST)


class Agreement:
    """Agreement of the ranks in one save or load: keys in the job's store. Without a store (one process), it is local.

    `patience`: time-out of a wait, in seconds without a `send_heartbeat` of any rank; None: no time-out. `newest`:
    prefix of the keys that hold the last `mark_done` of each rank; all saves share these keys, so that the store does
    not grow with the number of saves.
    """

    def __init__(
        self, store: Store | None, name: str, rank: int, world: int, patience: float | None = None, newest: str = ""
    ) -> None:
        assert store is not None or world == 1, "an agreement of several ranks needs the job's key-value store"
        self.store, self.name, self.rank, self.world = store, name, rank, world
        self.patience = patience and patience * (_OTHERS if rank else 1)
        self._newest = newest
        self._mine: dict[str, Any] = {}
        self._seen = 0  # number of heartbeats sent by all ranks together, as read at the last check
        self._next = 0.0  # time of this rank's next heartbeat

    def publish(self, key: str, value: Any) -> None:
        """Publish a value to all ranks."""
        self._mine[key] = value
        if self.store is not None and self.world > 1:
            self.store.set(f"{self.name}/{key}", json.dumps(value))

    def wait_for(self, key: str, publisher: str = "rank 0") -> Any:
        """Wait for `key` of `publisher` and return its value. Raises Failed if a rank failed or the wait timed out."""
        if self.world > 1:
            self._wait_until(lambda: self._exists(key), lambda: f"{publisher} has not answered")
            assert self.store is not None
            return json.loads(self.store.get(f"{self.name}/{key}"))
        return self._mine[key]

    def fail(self, what: Any, late: bool = False) -> None:
        """Make the save or load fail on all ranks. If several ranks fail, all ranks raise the cause published first."""
        if self.world == 1:
            self._mine.setdefault("failed", [what, late])
        elif self.store is not None and self._fails_first():
            self.store.set(f"{self.name}/failed", json.dumps([what, late]))

    def _fails_first(self) -> bool:
        """Return whether this rank is the first to fail; True if the store is lost: two causes are better than none."""
        assert self.store is not None
        try:
            return self.store.add(f"{self.name}/failures", 1) == 1
        except StoreLost:
            return True

    def check(self) -> None:
        """Raise Failed if any rank has failed."""
        if self.store is not None and self.world > 1:
            if self._exists("failed"):
                raise Failed(*json.loads(self.store.get(f"{self.name}/failed")))
        elif "failed" in self._mine:
            raise Failed(*self._mine["failed"])

    def send_heartbeat(self) -> None:
        """Report progress, so that no wait of any rank times out yet. May be called often: heartbeats are throttled."""
        now = time.monotonic()
        if self.patience is not None and self.store is not None and self.world > 1 and now >= self._next:
            self._next = now + _HEARTBEAT * self.patience
            with contextlib.suppress(StoreLost):  # harmless: the next request reports the lost store
                self.store.add(f"{self.name}/alive", 1)

    def count(self, key: str, number: int) -> int:
        """Add to a counter that all ranks share, and return its new value."""
        if self.store is not None and self.world > 1:
            return self.store.add(f"{self.name}/{key}", number)
        self._mine[key] = self._mine.get(key, 0) + number
        return self._mine[key]

    def mark_done(self, key: str) -> None:
        """Mark this rank's part of `key` as done."""
        if self.store is not None and self.world > 1 and self.patience is not None:
            self.store.set(f"{self._newest}/{self.rank}", f"{self.name}/{key}")
        self.count(key, 1)

    def wait_for_all(self, key: str) -> None:
        """Wait until every rank has marked `key` as done. Raises Failed if a rank failed or the wait timed out."""
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
        """Return a message about the ranks that have not answered: their numbers on rank 0, their count elsewhere."""
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
