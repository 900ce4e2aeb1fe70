"""Prefetching in daemon threads, for batch readers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Generic, NoReturn, TypeVar

T = TypeVar("T")
PATIENCE = 5.0  # timeout in seconds of `close` for threads that still run `make`


class ReadAhead(Generic[T]):
    """Prefetcher: results of `make(n, slot)` for n = 0, 1, 2, ..., computed in threads and taken in order.

    A slot (0 to slots - 1) is the number of a reused buffer, whose former result is no longer read. The last result of
    `take` keeps its slot until the next `take`, so at most slots - 1 results are prefetched. No other code may use the
    buffers, because a thread that hangs in `make` may write to its buffer even after `close`.

    prepare  function that each thread calls first; `take` raises its error as if `make` had raised it
    """

    def __init__(
        self, make: Callable[[int, int], T], slots: int, threads: int = 1, prepare: Callable[[], None] | None = None
    ) -> None:
        self._make, self._slots, self._prepare = make, slots, prepare
        self._changed = threading.Condition()
        self._made: dict[int, T | BaseException] = {}
        self._begun = self._released = self._taken = 0
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"read-ahead-{n}", daemon=True) for n in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def take(self) -> T:
        """Return the next result. Raises the error of `make`, also in all later calls; RuntimeError after `close`."""
        with self._changed:
            if self._closed:
                raise RuntimeError("this reader is closed")
            self._released = self._taken
            self._changed.notify_all()
            while self._taken not in self._made:
                self._changed.wait()
                if self._closed:
                    raise RuntimeError("this reader was closed")
            outcome = self._made[self._taken]
            if isinstance(outcome, BaseException):
                raise outcome
            del self._made[self._taken]
            self._taken += 1
            return outcome

    def close(self) -> None:
        """End the threads; a thread that stays in `make` for more than `PATIENCE` seconds ends with the process."""
        with self._changed:
            self._closed = True
            self._made.clear()
            self._changed.notify_all()
        until = time.monotonic() + PATIENCE
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        make = self._make
        try:
            if self._prepare is not None:
                self._prepare()
        except BaseException as error:
            make = partial(_raise, error)
        while True:
            with self._changed:
                while not self._closed and self._begun >= self._released + self._slots:
                    self._changed.wait()
                if self._closed:
                    return
                n = self._begun
                self._begun += 1
            outcome: T | BaseException
            try:
                outcome = make(n, n % self._slots)
            except BaseException as error:
                outcome = error
            with self._changed:
                if self._closed:
                    return
                self._made[n] = outcome
                self._changed.notify_all()
                if isinstance(outcome, BaseException):
                    return


def _raise(error: BaseException, n: int, slot: int) -> NoReturn:
    raise error
