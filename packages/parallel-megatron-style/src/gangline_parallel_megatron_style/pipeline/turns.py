"""Run two computations of one rank in turns: while one waits for a transfer, the other continues.

Each computation has a thread, because otherwise a backward pass cannot be suspended and resumed. One thread runs at a
time, and the threads switch only when a module calls `forward_context.overlap_point`. So the order in which the rank
starts transfers depends on the model alone, and is equal on all ranks that take part in the transfers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch

from gangline.model import forward_context


class Abandoned(Exception):
    """Raised in a computation after the other computation of the pair has failed."""


class TurnTaking:
    """Runner of pairs of computations: `first` in the caller's thread, `second` in a thread of this object."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, first: Callable[[], object], second: Callable[[], object]) -> tuple[float, float]:
        """Run two computations in turns: `first` starts in this thread, `second` when `first` waits or ends.

        Returns the seconds that each of them ran. Raises the error of a computation that fails.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="turns", daemon=True)
            self._thread.start()
        pair, stream = _Pair(), _keep_stream()

        def run_second() -> None:
            with stream:
                pair.run_in_turns(1, second)

        surroundings = forward_context.swap()
        self._jobs.put(run_second)
        with forward_context.take_turns(pair.overlap_point):
            if not pair.run_in_turns(0, first):
                pair.go[0].acquire()
        forward_context.swap(surroundings)
        if pair.failed is not None:
            raise pair.failed
        return pair.seconds[0], pair.seconds[1]

    def _serve(self) -> None:
        while True:
            self._jobs.get()()


class _Pair:
    def __init__(self) -> None:
        self.go = threading.Semaphore(1), threading.Semaphore(0)
        self.over = [False, False]
        self.seconds = [0.0, 0.0]
        self.failed: BaseException | None = None
        self._turn, self._since = 0, time.perf_counter()

    def run_in_turns(self, number: int, work: Callable[[], object]) -> bool:
        """Run computation `number`, from its first turn to its end; return whether the other computation has ended."""
        self.go[number].acquire()
        try:
            if self.failed is None:
                work()
        except Abandoned:
            pass
        except BaseException as error:
            self.failed = self.failed or error
        self.over[number] = True
        last = self.over[1 - number]
        self._pass_on()
        return last

    def overlap_point(self) -> None:
        """Run the other computation until it waits or ends; called by the current computation when it would wait."""
        number = self._turn
        if self.over[1 - number]:
            return
        surroundings = forward_context.swap()
        self._pass_on()
        self.go[number].acquire()
        forward_context.swap(surroundings)
        if self.failed is not None:
            raise Abandoned

    def _pass_on(self) -> None:
        now = time.perf_counter()
        self.seconds[self._turn] += now - self._since
        self._turn, self._since = 1 - self._turn, now
        self.go[self._turn].release()


def _keep_stream() -> AbstractContextManager[object]:
    """Return a context that sets this thread's current CUDA stream, which is thread-local, in another thread."""
    return torch.cuda.stream(torch.cuda.current_stream()) if torch.cuda.is_initialized() else nullcontext()
